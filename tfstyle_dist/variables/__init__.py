"""Layer 3: variables, adopted parameters and buffers, and the store that knows them."""

from tfstyle_dist.variables.component import VariableComponent
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.store import ParameterStore
from tfstyle_dist.variables.variable import DistributedVariable, Variable

__all__ = [
    "DistributedVariable",
    "ParameterStore",
    "Placement",
    "Record",
    "Variable",
    "VariableComponent",
    "find_record",
]
