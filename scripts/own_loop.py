"""The control loop in a training loop of one's own: the lines marked (1) to (3) are all it takes.

python scripts/own_loop.py        (on the GPU if there is one; without one B has no memory reading to follow)
"""

import torch
from torch.nn.functional import cross_entropy

from triaccel_bench import TriAccel
from triaccel_bench.configuration import compose
from triaccel_bench.data import load
from triaccel_bench.models import ResNet8

device = "cuda" if torch.cuda.is_available() else "cpu"
data = load(compose(["dataset=digits", f"device={device}"]).dataset)
images, labels = (data.x_train.float() / 255 - 0.3).to(device), data.y_train.to(device)
torch.manual_seed(0)
model = ResNet8(num_classes=10).to(device)

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loop = TriAccel(model, optimizer, batch=96, overrides=["method.control.interval=5", "method.curvature.every=10"])  # (1)
for epoch in range(2):
    order = torch.randperm(len(images), device=device)
    while len(order) > 1:
        index, order = order[: loop.batch_size], order[loop.batch_size :]  # (2)
        loss = cross_entropy(model(images[index]), labels[index])
        loop.step(loss, images[index], labels[index])  # (3) backward, statistics, update, decisions
    slowest = min(loop.rates.values())
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, B {loop.batch_size}, slowest layer rate {slowest:.3f}")
