"""A folder of programs that behave as llama.cpp's do: they load nothing, and answer at once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ggufspec.bench.llama_server import LlamaCppProgram

PROGRAM = LlamaCppProgram(Path("binary"), Path("t.gguf"), Path("d.gguf"), 1024, 4, 1, 0, -1)
ANSWER = {  # of llama.cpp 0.5.0, shortened
    "index": 0,
    "content": ". Bowyer, and so",
    "tokens": [15, 399, 306, 3794, 13, 273],
    "tokens_predicted": 6,
    "tokens_evaluated": 4,
    "timings": {
        **{"cache_n": 0, "prompt_n": 4, "prompt_ms": 21.606, "prompt_per_token_ms": 5.4015},
        **{"predicted_n": 6, "predicted_ms": 115.002, "predicted_per_token_ms": 7.67},
        **{"draft_n": 5, "draft_n_accepted": 3},
    },
}
SERVER = """\
#!{python}
import http.server, json, os, signal, sys
how = {how!r}
at = sys.argv.index
port = int(sys.argv[at("--port") + 1])
open({pids!r}, "a").write(f"{{os.getpid()}}\\n")
if how == "fails" or (how == "fails with a draft" and "-md" in sys.argv):
    sys.exit("error: failed to load model")
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Answers(http.server.BaseHTTPRequestHandler):
    n_asked = 0
    def do_GET(self):
        Answers.n_asked += 1
        ready = Answers.n_asked > 2 and how != "never ready"
        self.tell(200 if ready else 503, {{"status": "ok" if ready else "loading"}})
    def do_POST(self):
        if how == "dies":
            print("GGML_ASSERT(false) failed", flush=True)
            os._exit(134)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {answer!r}
        answer["tokens_evaluated"] = len(asked["prompt"]) + (how == "reads more")
        answer["tokens"] = list(range(30, 30 + asked["n_predict"]))
        answer["timings"]["predicted_n"] = asked["n_predict"]
        refused = how == "refuses"
        self.tell(400 if refused else 200, {{"error": "no such field"}} if refused else answer)
    def tell(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@dataclass(frozen=True)
class Build:
    """A folder of programs that behave as llama.cpp's."""

    folder: Path

    def server(self, how: str = "") -> LlamaCppProgram:
        path = self.folder / "llama-server"
        pids = str(self.folder / "pids")
        path.write_text(SERVER.format(python=sys.executable, how=how, pids=pids, answer=ANSWER))
        path.chmod(0o755)
        return replace(PROGRAM, binary=path)

    @property
    def left(self) -> list[int]:
        """The servers that were started and are still there."""
        pids = map(int, (self.folder / "pids").read_text().split())
        return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
