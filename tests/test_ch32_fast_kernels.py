"""Chapter 32: fast attention kernels. The graders stand in tests/ch32/, a file a subject; this is the one to run."""

import pytest

from tests.ch32.device import TRITON  # first of all: it decides how Triton's kernels run
from tests.ch32.gathering import *  # noqa: F403
from tests.ch32.tiles import *  # noqa: F403

if TRITON:
    from tests.ch32.choosing import *  # noqa: F403
    from tests.ch32.decoding import *  # noqa: F403
    from tests.ch32.merging import *  # noqa: F403
    from tests.ch32.mixing import *  # noqa: F403
    from tests.ch32.prefilling import *  # noqa: F403
    from tests.ch32.storing import *  # noqa: F403
else:

    @pytest.mark.skip(reason="kernels need the package triton, which exists for Linux")
    def test_the_kernels():
        pass
