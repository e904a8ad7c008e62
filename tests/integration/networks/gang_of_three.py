"""As `node.py`, for a gang of three."""

import json
import sys

import node

node.NUM_NODES = 3

if __name__ == "__main__":
    node.main(**json.loads(sys.argv[1]))
