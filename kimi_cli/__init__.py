"""kimi: run Kimi K3 on one CPU, exactly, in as little memory as the user allows."""

import os

# Read once by libraries when they are loaded, so set before any of them is. A BLAS thread pool
# would cost memory nobody asked for, and OpenMP workers that spin while waiting would steal the
# cores from the threads that read.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
