"""Chapter 33, its second half. The graders stand in tests/ch33/, a file a subject; this is the one to run."""

import tests.ch32.device  # noqa: F401  first of all: it decides how Triton's kernels run
from tests.ch33.ahead import *  # noqa: F403
from tests.ch33.failing import *  # noqa: F403
from tests.ch33.machine import *  # noqa: F403
from tests.ch33.matrix import *  # noqa: F403
from tests.ch33.rows import *  # noqa: F403
from tests.ch33.static import *  # noqa: F403
