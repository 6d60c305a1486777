"""Chapter 31: the core of the engine. The graders stand in tests/ch31/, a file a subject; this is the one to run."""

from tests.ch31.adopting import *  # noqa: F403
from tests.ch31.asking import *  # noqa: F403
from tests.ch31.attending import *  # noqa: F403
from tests.ch31.equality import *  # noqa: F403
from tests.ch31.failing import *  # noqa: F403
from tests.ch31.flat_layers import *  # noqa: F403
from tests.ch31.flat_model import *  # noqa: F403
from tests.ch31.guarding import *  # noqa: F403
from tests.ch31.hashing import *  # noqa: F403
from tests.ch31.interrupting import *  # noqa: F403
from tests.ch31.layout import *  # noqa: F403
from tests.ch31.lifetime import *  # noqa: F403
from tests.ch31.machine import *  # noqa: F403
from tests.ch31.memory import *  # noqa: F403
from tests.ch31.pool_machine import *  # noqa: F403
from tests.ch31.pool_rest import *  # noqa: F403
from tests.ch31.preemption import *  # noqa: F403
from tests.ch31.progress import *  # noqa: F403
from tests.ch31.publishing import *  # noqa: F403
from tests.ch31.queues import *  # noqa: F403
from tests.ch31.resuming import *  # noqa: F403
from tests.ch31.sampling_rules import *  # noqa: F403
from tests.ch31.scheduling import *  # noqa: F403
from tests.ch31.stepping import *  # noqa: F403
from tests.ch31.stopping import *  # noqa: F403
from tests.ch31.writing import *  # noqa: F403
