"""What all simulators share, made once: imported by the fork server, then copied on write by each fork.

A robot's process so starts in a fraction of a second, with a few megabytes of its own. OpenGL must not be
touched here: its contexts do not survive a fork. Importing this module anywhere else just costs the time.
"""

import gc
import os

# One simulator is one core's work; set before numpy starts its threads.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", LP_NUM_THREADS="1")

from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.libero_setup import SimulatorSetupError

ENV: LiberoEnv | None = None
try:
    ENV = LiberoEnv()
    ENV.reset(seed=0)  # compiles the controller's numba functions
except SimulatorSetupError:
    pass  # the robot's process meets it again, and reports it

gc.collect()
gc.freeze()  # the collector would otherwise write to, and so copy, every shared page
