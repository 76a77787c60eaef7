"""One table of what commands refuse: an exit code, one clear message on stderr, nothing written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from cli.conftest import ERROR, USAGE, Command

# The folder has: it (a model), mine.json (of the user), prompts.txt, long.txt, empty.txt and the
# folder folder.svg. By how a command begins: what is added, and a part of the message.
REFUSED: dict[str, list[tuple[str, str]]] = {
    "run -t 1 -m it -p hi": [
        # Names and numbers
        ("--nope", "--nope"),
        ("stray", "unexpected extra argument (stray)"),
        ("-n many", "'-n' / '--n-predict': 'many'"),
        ("-n -3", "-3 is not in the range x>=-2"),
        ("-s -2", "-2 is not in the range x>=-1"),
        ("-ctk q3", "'-ctk' / '--cache-type-k': 'q3' is not one of 'f32'"),
        ("--tree oak", "'oak' is not one of 'auto', 'on', 'off'"),
        ("--temp nan", "--temp': 'nan' is not a number"),
        ("--top-p 0", "0.0 is not in the range 0<x<=1"),
        ("-ngl most", "'most' is neither a number nor auto"),
        ("-ctv q8_0 -fa off", "need flash attention"),
        # Lists
        ("-ts 3,x", "'3,x' is not a list of proportions"),
        ("-ts 0,0", "'0,0' is not a list of proportions"),
        ("--rpc host:1,host", "--rpc: 'host' has no port"),
        ("--lora-scaled nan.gguf:nan", "must be a finite number"),
        ("-l five+1", "'five+1' is not a token id with a bias"),
        ("-l 5+inf", "logit_bias of token 5"),
        ("--samplers 'top_k;infill'", "'infill' is not supported"),
        ("--samplers ';'", "no sampler is named"),
        # Drafts
        ("--draft-n 3", "--draft-n needs a draft model"),
        ("--compare --drafter none", "--compare needs a draft model"),
        ("--drafter model", "'model' needs a draft"),
        ("--drafter oracle", "choose from"),
        ("--verify _lossy", "choose from"),
        ("--draft-temp 0.5", "--draft-temp needs a draft model"),
        ("-cmoed", "--n-cpu-moe-draft needs a draft model"),
        ("-otd exps=CPU", "--override-tensor-draft needs a draft model"),
        ("--lora-draft a.gguf", "--lora-draft needs a draft model"),
        ("--draft-n 65 -md x.gguf", "65 is not in the range 1<=x<=64"),
        ("--draft-temp auto -md x.gguf", "'auto' is not a valid float"),
        ("--draft-temp -1 -md x.gguf", "draft_temperature is -1.0"),
        # Constraints
        ("--mirostat 3", "'--mirostat': 3 is not in the range 0<=x<=2"),
        ("--grammar 'start:<think>'", "unknown special token"),
        ("""-j '{"not":{"const":1}}'""", 'at #: "not" cannot be guaranteed; leave it out'),
        ("--json-schema {", "JSON"),
        ("--json-schema {} --grammar x", "--json-schema and --grammar were given; give one"),
        ("--regex-file .", "the file . is a folder"),
        # Files
        ("-f prompt.txt", "with -p or with -f, not both"),
        ("--prompt-cache-ro", "--prompt-cache-ro needs --prompt-cache"),
        ("--prediction .", "is a directory"),
    ],
    "run -p hi": [("", "Missing option '-m' / '--target'")],
    "walk": [("", "No such command 'walk'")],
    "audit -m it": [("", "--draft")],
    "audit -m it -md it -t 1": [
        ("--runs 0", "--runs"),
        ("-n 1", "-n"),
        ("--alpha 0.5", "--alpha"),
        ("--near-tie -1", "--near-tie"),
        ("--verify telepathy", "choose from"),
        ("--prompts none.txt", "cannot be read: No such file"),
        ("--prompts long.txt", "shorten"),
    ],
    "batch prompts.txt -m it -o r.jsonl": [
        ("-o mine.json", "mine.json exists already"),
        ("-o mine.json --resume", "not written by ggufspec batch"),
        ("-o folder.svg", "it is a folder"),
        ("-o - --resume", "--resume needs the output file"),
        ("--retry-failed", "needs --resume"),
        ("--no-chat --system x", "--system needs the chat template"),
        ("--num-processes 0", "0 is not in the range"),
        ("--num-processes 2 --rpc a:1", "one process at a time"),
        ("--cluster-gpus 1", "--cluster-gpus needs --cluster"),
    ],
    "batch empty.txt -m it -o r.jsonl": [("", "has no prompts")],
    "batch none.txt -m it -o r.jsonl": [("", "cannot be read")],
    "bench -m it -cmoed": [("", "needs a draft model: name one with --draft")],
    "bench -m it -t 1 -p hi": [("--draft-n 3", "needs a draft")],
    "bench -m it -md it -t 1 -p hi": [
        ("--draft-n 65", "is not a list of lengths"),
        ("--draft-n ''", "is not a list of lengths"),
        ("--draft-n 1-99999", "is not a list of lengths"),
        ("--draft-n 2,8-3", "is not a list of lengths"),
        ("--temp 0,,1", "is not a list of temperatures"),
        ("--drafter none", "is plain decoding, which is always measured"),
        ("--verify nothing", "nothing"),
        ("--json mine.json", "exists already: continue it with --resume"),
        ("--json none/out.json", "No such file or directory"),
        ("--resume", "name it with --json"),
        ("--plot out.pdf", "name a file with the suffix"),
        ("--preset gpt2 --draft-n 3", "--preset gpt2 sets --draft-n itself"),
        ("--preset gpt2 --regex-file mine.json", "--preset gpt2 sets --regex-file"),
        ("--against llama.cpp --rpc 127.0.0.1:50052", "cannot be combined with --rpc"),
        ("--prompts mine.json", "not both"),
        ("--against llama.cpp --llama-bin .", "there is no program llama-server"),
    ],
    "compare -p hi": [
        ("-m it --drafter none", "--drafter none"),
        ("-m it --speed inf", "--speed"),
        ("-m it --verify _lossy", "choose from"),
        ("-m it --record race", ".svg or .cast"),
        ("-m it --record folder.svg", "cannot write folder.svg into the folder"),
        ("-m it --size 10M", "--size is for the embedded pair"),
        ("-m it --drafter model", "needs a draft"),
        ("-md it", "--draft needs --target"),
        ("-m it -md it,it", "is given twice"),
        (f"-m it -md {','.join(['it'] * 17)}", "give at most 16"),
        ("-m it -md it,none.gguf", "there is no file none.gguf"),
    ],
    "demo --size 10M --cache-dir cache": [
        ("--size 5", "'5' is not a size"),
        ("--size 70B", "too large"),
        ("-n 0", "-n"),
    ],
    "plan -m it": [
        ("--vram -1", "Invalid value"),
        ("--ram 24QiB", "Invalid value"),
        ("--ram 1e99", "Invalid value"),
        ("--acceptance nan", "Invalid value"),
        ("--ram-bandwidth 0.4", "Invalid value"),
        ("--draft-n 0", "Invalid value"),
        ("-cd 512", "needs a draft model: name one with --draft"),
        ("--vram 24GiB --rpc 127.0.0.1:50052", "--vram is for another machine"),
        ("--rpc 127.0.0.1", "'127.0.0.1' has no port"),
    ],
    "plan -m none.gguf": [("", "there is no file")],
    "serve": [
        ("--draft d.gguf", "--draft needs --target"),
        ("--api-key ''", "is empty"),
        ("--api-key-file /nowhere/keys", "the file of keys /nowhere/keys cannot be read"),
        ("--api-key-file empty.txt", "is empty; write one key per line"),
        ("--chat-template-file /nowhere/c.jinja", "the file /nowhere/c.jinja cannot be read"),
        ("--top-p 2", "--top-p"),
        ("--mirostat 3", "'--mirostat': 3 is not in the range 0<=x<=2"),
        ("--host 'no such host.invalid'", "does not exist"),
        ("--verify _lossy", "no verification rule '_lossy'"),
        ("--host 192.0.2.1", "192.0.2.1 is not an address of this machine"),
        ("--timeout nan", "not a number"),
        ("--grace nan", "not a number"),
        ("-m t.gguf --draft-temp 1", "needs a draft model"),
        ("-m /nowhere/t.gguf --port 0", "t.gguf"),
        ("--drafter oracle -m t.gguf --port 0", "t.gguf"),
    ],
    "standin --like it model.gguf": [
        ("--agreement 1.1", "--agreement"),
        ("--agreement nan", "--a"),
    ],
    "standin --like 70B-Q3_K_X model.gguf": [("", "did you mean 70B-Q3_K_S")],
    "trim it -o out.gguf": [
        ("", "nothing would be cut"),
        ("--vocab 10", "are always kept"),
        ("--vocab 1000000000", "cannot be trimmed to 1,000,000,000 tokens: it has 388"),
        ("--layers 1-0", "is not a list such as 0-10,14-23"),
        ("--layers 0,7", "has no layers 7"),
        ("--type q9", "not a quantization"),
        ("--vocab 320 --text no-such.txt", "cannot be read"),
        ("--layers 0 --text no-such.txt", "give their number with --vocab"),
    ],
    "tune": [("", "--target")],
    "tune -m it": [
        ("-cmoed", "needs a draft model: name one with --draft"),
        ("-c 16", "has no room for a pass of 17: use at least 17"),
        ("--max-n 65", "--max-n"),
        ("-c 24 --depth 20 --max-n 4", "no room for 20 tokens and a pass of 5: use at least 25"),
        ("-t 513", "513 is not in the range"),
    ],
}
OF_FILES = {  # the messages that tell of a file instead of the command line
    *("cannot be read: No such file", "shorten", "it is a folder", "has no prompts"),
    *("cannot be read", "No such file or directory", "cannot write folder.svg into the folder"),
    *("there is no file none.gguf", "there is no file", "t.gguf", "did you mean 70B-Q3_K_S"),
}
ROWS = [(begins, *row) for begins, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("begins", "args", "named"), ROWS)
def test_what_cannot_be_done_is_refused_before_it(
    begins: str,
    args: str,
    named: str,
    command: Command,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it").symlink_to(target)
    Path("folder.svg").mkdir()
    texts = {"mine.json": "mine", "prompts.txt": "hi\n", "long.txt": "a word " * 3000}
    for name, text in {**texts, "empty.txt": "\n"}.items():
        Path(name).write_text(text)
    there = sorted(os.listdir())
    result = command(*shlex.split(begins), *shlex.split(args))
    assert (result.code, result.out) == (ERROR if named in OF_FILES else USAGE, "")
    assert named in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert "runs first" not in result.err, "before anything runs"
    assert (sorted(os.listdir()), Path("mine.json").read_text()) == (there, "mine")
