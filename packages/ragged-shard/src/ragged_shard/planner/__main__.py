"""The planner's command line: ``python -m ragged_shard.planner --preset deepseek-v3``."""

import sys

from ragged_shard.planner.command_line.command import main

if __name__ == "__main__":
    sys.exit(main())
