import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: on tensors so small threads only cost
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which reads it once
