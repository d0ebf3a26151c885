"""Self-attention on fewer tokens: the formula, and one operator a file."""

from .agents import Agents
from .downsample import Downsample
from .merge import Merge
from .operator import Operator
from .pooled import PooledAgents

__all__ = ["Agents", "Downsample", "Merge", "Operator", "PooledAgents"]
