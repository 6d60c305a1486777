"""Chapter 31: the core of the engine. The graders stand in tests/ch31/, a file a subject; this is the one to run."""

from tests.ch31.machine import *  # noqa: F403
from tests.ch31.preemption import *  # noqa: F403
from tests.ch31.progress import *  # noqa: F403
from tests.ch31.resuming import *  # noqa: F403
from tests.ch31.scheduling import *  # noqa: F403
