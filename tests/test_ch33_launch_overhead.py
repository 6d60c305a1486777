"""Chapter 33: launch overhead. The graders stand in tests/ch33/, a file a subject; this is the one to run."""

import pytest

from tests.ch32.device import TRITON  # first of all: it decides how Triton's kernels run
from tests.ch33.ahead import *  # noqa: F403
from tests.ch33.drawing import *  # noqa: F403
from tests.ch33.failing import *  # noqa: F403
from tests.ch33.layers import *  # noqa: F403
from tests.ch33.machine import *  # noqa: F403
from tests.ch33.matrix import *  # noqa: F403
from tests.ch33.merging import *  # noqa: F403
from tests.ch33.noise import *  # noqa: F403
from tests.ch33.rows import *  # noqa: F403
from tests.ch33.static import *  # noqa: F403
from tests.ch33.whole import *  # noqa: F403

if TRITON:
    from tests.ch33.gates import *  # noqa: F403
    from tests.ch33.heads import *  # noqa: F403
    from tests.ch33.kerneled import *  # noqa: F403
    from tests.ch33.matvec import *  # noqa: F403
    from tests.ch33.norms import *  # noqa: F403
    from tests.ch33.parts import *  # noqa: F403
else:

    @pytest.mark.skip(reason="kernels need the package triton, which exists for Linux")
    def test_the_kernels():
        pass
