"""Single process, DDP, FSDP2 or HSDP training of any torch module, decided by one config.

See `parallel_engine.engine` for the five lines.
"""

from parallel_engine.agreement import agree as agree
from parallel_engine.agreement import any_rank as any_rank
from parallel_engine.agreement import from_main as from_main
from parallel_engine.agreement import together as together
from parallel_engine.ema import Ema as Ema
from parallel_engine.ema import resume_average as resume_average
from parallel_engine.engine import Engine as Engine
from parallel_engine.errors import EngineError as EngineError
from parallel_engine.errors import NonFiniteError as NonFiniteError
from parallel_engine.errors import PeerError as PeerError
from parallel_engine.errors import UnitOrderError as UnitOrderError
from parallel_engine.errors import UnusedParametersError as UnusedParametersError
from parallel_engine.evaluation import EvalReport as EvalReport
from parallel_engine.evaluation import evaluate_loss as evaluate_loss
from parallel_engine.loss import Answer as Answer
from parallel_engine.loss import Loss as Loss
from parallel_engine.loss import LossFn as LossFn
from parallel_engine.materialize import initialize as initialize
from parallel_engine.materialize import parameters_on_meta as parameters_on_meta
from parallel_engine.plan import ShardPlan as ShardPlan
from parallel_engine.plan import UnitPlan as UnitPlan
from parallel_engine.plan import plan as plan
from parallel_engine.process import connect as connect
from parallel_engine.process import leave as leave
from parallel_engine.process import part as part
from parallel_engine.update import StepReport as StepReport
from parallel_engine.wrapping import unwrap as unwrap
