"""One thread an operation: tests are tiny, and threads that wait for each other on a busy machine cost seconds."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
