"""A model directory with a tokenizer of bytes and a chat template, and a server in front of it, as a process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.comm import SerialGroup
from mpitp.data.tokenizer import byte_tokenizer
from mpitp.layers.site import make_site
from mpitp.models import config_from_hf, new_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
IS_OPEN_MPI = (Path(sys.executable).parent / "ompi_info").exists()
CONFIG = {
    **{"model_type": "llama", "vocab_size": 260, "hidden_size": 24, "num_attention_heads": 3, "head_dim": 8},
    **{"num_key_value_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 512},
    **{"rope_theta": 1e4, "eos_token_id": 256, "bos_token_id": 256},
}


def make_directory(directory: Path, *, template: bool = True, **config: Any) -> Path:
    """A model with weights of chance."""
    model = new_model(config_from_hf(CONFIG | config), make_site(SerialGroup()), seed=3)
    for name, param in model.named_params():
        if "norm" not in name:
            param.data *= 8  # texts of more than one letter
    files = dict(byte_tokenizer().files)
    if template:
        document = json.loads(files["tokenizer_config.json"]) | {"chat_template": TEMPLATE}
        files["tokenizer_config.json"] = json.dumps(document).encode()
    save_model(model, directory, SerialGroup(), Documents(CONFIG | config, extra_files=files))
    return directory


class Served:
    """A running server: where it is, its process, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str], url: str, mpirun: bool = False) -> None:
        self.process, self.url, self.errors = process, url, ""
        self._ends_on = signal.SIGUSR1 if mpirun and IS_OPEN_MPI else signal.SIGTERM
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def wait(self, seconds: float = 20.0) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def end(self) -> None:
        """TERM ends it in order; Open MPI's own mpirun leaves no time for that, but hands USR1 on."""
        self.process.send_signal(self._ends_on)
        assert self.wait() == 0


@contextlib.contextmanager
def served(directory: Path, *options: str, ranks: int = 1, mpirun: bool = False) -> Iterator[Served]:
    """A server on a free port; it is killed at the end, if it runs still. `mpirun`: by that of this environment, not
    by `mpitp launch`.
    """
    python = [sys.executable, "-m", "mpitp"]
    if mpirun:
        python = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), *python]
    elif ranks > 1:
        python += ["launch", "-n", str(ranks), "--"]
    words = [*python, "serve", "--model", str(directory), "--port", "0", *options]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                if found := re.search(r"http://\S+", line):
                    break
            else:
                raise AssertionError(f"the server didn't start: {process.stderr.read()}")
            yield Served(process, found[0], mpirun)
        finally:
            process.kill()
