"""Configuration of a node: read once, checked whole, frozen. The public names of this folder."""

from tickwheel.node.config.read import ConfigError, read_config, to_toml
from tickwheel.node.config.relations import Problem
from tickwheel.node.config.sections import NodeConfig

__all__ = ["ConfigError", "NodeConfig", "Problem", "read_config", "to_toml"]
