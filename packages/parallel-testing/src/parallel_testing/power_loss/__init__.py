"""What a power cut can leave of a folder: recorded calls, a disk that may forget, every state.

with recorded(root) as calls:            # the calls that really change what lies below root
    save(root / "run")
    mark(calls, "saved")
for state in crash_states(calls, Bound()):   # each tree that the model allows
    materialize(state.tree, folder)          # real files, for real readers

The model is written down in docs/decisions/0015-what-a-power-cut-leaves.md.
"""

from parallel_testing.power_loss.calls import Call as Call
from parallel_testing.power_loss.calls import merged as merged
from parallel_testing.power_loss.disk import Disk as Disk
from parallel_testing.power_loss.disk import Tree as Tree
from parallel_testing.power_loss.disk import replay as replay
from parallel_testing.power_loss.mutants import Mutant as Mutant
from parallel_testing.power_loss.mutants import mutants as mutants
from parallel_testing.power_loss.recorder import Recorder as Recorder
from parallel_testing.power_loss.recorder import recorded as recorded
from parallel_testing.power_loss.states import Bound as Bound
from parallel_testing.power_loss.states import State as State
from parallel_testing.power_loss.states import crash_states as crash_states
from parallel_testing.power_loss.trees import Blobs as Blobs
from parallel_testing.power_loss.trees import read_tree as read_tree
