"""Layer 5: models in parts over several workers or XLA devices; their state as full tensors."""

from tfstyle_dist.model_parallel.splitting import num_local_elements, tensor_split, whole
from tfstyle_dist.model_parallel.state import full_state_dict, load_full_state_dict

__all__ = ["full_state_dict", "load_full_state_dict", "num_local_elements", "tensor_split", "whole"]
