"""One thread an operation: tests are tiny, and threads that wait for each other on a busy machine cost seconds.

On a card, cuBLAS workspaces as runs have them: its own are as large as the small models of these tests.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":1024:2:16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "2048")
