"""Single process, DDP, FSDP2 or HSDP training of any torch module, decided by one config.

See `parallel_engine.engine` for the five lines.
"""

from parallel_engine.ema import Ema as Ema
from parallel_engine.ema import resume_average as resume_average
from parallel_engine.engine import Engine as Engine
from parallel_engine.evaluation import EvalReport as EvalReport
from parallel_engine.evaluation import evaluate_loss as evaluate_loss
from parallel_engine.failures import PeerError as PeerError
from parallel_engine.materialize import initialize as initialize
from parallel_engine.materialize import parameters_on_meta as parameters_on_meta
from parallel_engine.nonfinite import NonFiniteError as NonFiniteError
from parallel_engine.plan import ShardPlan as ShardPlan
from parallel_engine.plan import UnitPlan as UnitPlan
from parallel_engine.plan import plan as plan
from parallel_engine.process import agree as agree
from parallel_engine.process import any_rank as any_rank
from parallel_engine.process import connect as connect
from parallel_engine.process import from_main as from_main
from parallel_engine.process import leave as leave
from parallel_engine.process import part as part
from parallel_engine.process import together as together
from parallel_engine.step import Loss as Loss
from parallel_engine.step import StepReport as StepReport
from parallel_engine.step import UnusedParametersError as UnusedParametersError
from parallel_engine.unit_order import UnitOrderError as UnitOrderError
from parallel_engine.wrapping import unwrap as unwrap
