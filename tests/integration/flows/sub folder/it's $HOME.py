import os
import runpy

runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "worker.py"), run_name="__main__")
