import os
import runpy
import sys

above = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(above)  # worker.py finds its neighbours there
runpy.run_path(os.path.join(above, "worker.py"), run_name="__main__")
