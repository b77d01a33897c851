"""SkyRL's Tinker server on the CPU: `python tinker_server.py FOLDER PORT SCRATCH`.

The server starts its engine with `uv run`, which would install other packages; here it runs in this environment.
"""

import ctypes
import signal
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):  # as in conftest.py; the engine does it, too
    typing.TypedDict = typing_extensions.TypedDict

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, config_to_argv

ENGINE = """
import ctypes, runpy, signal, sys, typing, typing_extensions
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
runpy.run_module("skyrl.tinker.engine", run_name="__main__")
"""

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the test
    model, port, scratch = sys.argv[1:4]
    api._build_uv_run_cmd_engine = lambda parent, config: [sys.executable, "-c", ENGINE, *config_to_argv(config)]
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        database_url=f"sqlite:///{scratch}/tinker.db",
        checkpoints_base=f"{scratch}/checkpoints",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=int(port), log_level="warning")
