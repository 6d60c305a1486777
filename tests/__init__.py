import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: on tensors so small threads only cost
