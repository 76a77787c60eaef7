"""Draft heads: which files have one, and what is refused before llama.cpp would end the process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec.errors import ModelError, VocabError
from ggufspec.models.gguf_file import GgufFile, Tensor, write
from ggufspec.models.head_facts import MTP, Block, HeadFacts
from ggufspec.models.header import Header, read_header
from ggufspec.models.heads import check_model, head_of, head_text, is_head, read_draft

TOKENS = [b"<unk>", b"a", b"b", b"c"]
WIDTH, OWN_WIDTH, N_OWN = 64, 32, 2

Shape = tuple[int, ...] | None  # None: no such tensor


def header(
    architecture: str,
    tensors: Mapping[str, Shape],
    tokens: list[bytes] = TOKENS,
    **keys: Any,
) -> Header:
    values = {"general.architecture": architecture, "tokenizer.ggml.tokens": tokens} | {
        f"{architecture}.{name.replace('__', '.')}": value for name, value in keys.items()
    }
    found = [
        Tensor(name, shape, "I64" if name == "d2t" else "F32")
        for name, shape in tensors.items()
        if shape
    ]
    return Header((Path(f"{architecture}.gguf"),), 1000, values, tuple(found))


def model(
    architecture: str = "llama", *, n_layers: int = 8, n_mtp: int = 0, **changed: Any
) -> Header:
    """A model with `n_mtp` layers for multi-token prediction after its `n_layers`."""
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (WIDTH, len(TOKENS)),
        "output.weight": (WIDTH, len(TOKENS)),
    }
    tensors |= {f"blk.{i}.attn_norm.weight": (WIDTH,) for i in range(n_layers + n_mtp)}
    tensors |= {
        f"blk.{i}.nextn.eh_proj.weight": (2 * WIDTH, WIDTH)
        for i in range(n_layers, n_layers + n_mtp)
    }
    keys: dict[str, Any] = {"block_count": n_layers + n_mtp, "embedding_length": WIDTH}
    if n_mtp:
        keys["nextn_predict_layers"] = n_mtp
    return header(architecture, tensors, **(keys | changed))


def sidecar(of: Header, **changed: Any) -> Header:
    """The MTP layers of a model, in a file of their own."""
    kept = [
        tensor
        for tensor in of.tensors
        if not tensor.name.startswith("blk.") or tensor in of.mtp_tensors
    ]
    values = of.values | {f"{of.architecture}.{key}": value for key, value in changed.items()}
    return replace(of, paths=(Path("mtp-model.gguf"),), tensors=tuple(kept), values=values)


def eagle3(
    shapes: dict[str, Shape] | None = None,
    tokens: list[bytes] = TOKENS,
    **changed: Any,
) -> Header:
    """An EAGLE-3 head of another width than its target, with a reduced vocabulary."""
    tensors: dict[str, Shape] = {
        "fc.weight": (3 * WIDTH, OWN_WIDTH),
        "token_embd.weight": (OWN_WIDTH, len(TOKENS)),
        "output.weight": (OWN_WIDTH, N_OWN),
        "d2t": (N_OWN,),
        **{f"blk.0.attn_{of}.weight": (2 * OWN_WIDTH, OWN_WIDTH) for of in "qkv"},
    }
    tensors |= shapes or {}
    keys = {
        "block_count": 1,
        "embedding_length": OWN_WIDTH,
        "attention__head_count": 4,
        "target_layers": [2, 4, 5],
        "target_hidden_size": WIDTH,
    }
    return header("eagle3", tensors, tokens, **(keys | changed))


def test_the_head_in_the_targets_file_is_found() -> None:
    target = model("glm4moe", n_mtp=1)
    assert head_of(target, None) == read_draft(target, MTP)[1] == HeadFacts("mtp", 1)
    assert head_of(model("step35", n_mtp=3), None) == HeadFacts("mtp", 3)
    assert head_text(target) == "has an MTP head (1 layer, 0 MB)"
    assert head_of(model(), None) is None
    assert not head_text(model())
    check_model(target)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (model("qwen35"), "has no MTP head"),
        (model("qwen35", n_mtp=2), "of 2 layers; llama.cpp runs one of 1 layer for qwen35"),
        (model("bailingmoe2", n_mtp=1), "llama.cpp runs none of the architecture bailingmoe2"),
        (model("qwen35", nextn_predict_layers=1), "has no MTP head (its conversion left it out"),
        (
            model("mimo2", n_mtp=3),
            "without blk.10.attn_qkv.weight, which llama.cpp needs for mimo2",
        ),
    ],
)
def test_a_target_without_a_usable_head_is_refused(target: Header, why: str) -> None:
    assert head_of(target, None) is None
    with pytest.raises(ModelError) as caught:
        read_draft(target, MTP)
    assert why in str(caught.value)
    assert "--draft auto" in str(caught.value)


def test_a_whole_model_with_a_head_is_an_ordinary_draft() -> None:
    small = model("glm4moe", n_layers=2, n_mtp=1)
    assert not is_head(small)
    assert head_of(model("llama"), small) is None
    assert head_of(model("llama"), model("llama", n_layers=1)) is None


def test_an_eagle3_head_without_its_own_ends_takes_the_targets() -> None:
    shapes: dict[str, Shape] = {
        "fc.weight": (3 * WIDTH, WIDTH),
        **{f"blk.0.attn_{of}.weight": (2 * WIDTH, WIDTH) for of in "qkv"},
        **dict.fromkeys(("token_embd.weight", "output.weight", "d2t")),
    }
    found = head_of(model(), eagle3(shapes, embedding_length=WIDTH))
    assert found == HeadFacts("eagle3", 1, (2, 4, 5), borrows_output=True)
    with pytest.raises(ModelError, match=r"2 rows of 64 in output.weight; the target has 4"):
        head_of(model(), eagle3({**shapes, "d2t": (N_OWN,)}, embedding_length=WIDTH))


@pytest.mark.parametrize("outside", [-1, len(TOKENS)])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_drafted_tokens_outside_the_vocabulary_are_refused(
    tmp_path: Path, kind: str, outside: int
) -> None:
    reduced: dict[str, Shape] = {"output.weight": (WIDTH, 2), "d2t": (2,)}
    made = eagle3() if kind == "eagle3" else dflash(reduced)

    def written(ids: list[int]) -> Header:
        data = [
            b"".join(i.to_bytes(8, "little", signed=True) for i in ids)
            if tensor.name == "d2t"
            else bytes(tensor.n_bytes)
            for tensor in made.tensors
        ]
        path = tmp_path / "eagle3.gguf"
        file = GgufFile(made.values, made.tensors, lambda: ([each] for each in data))
        write(file, path, force=True)
        return read_header(path)

    assert head_of(model(), written([3, 1]))
    with pytest.raises(ModelError, match=f"d2t has token {outside}, outside the vocabulary of 4"):
        head_of(model(), written([3, outside]))


def gemma(architecture: str = "gemma4", tokens: list[bytes] = TOKENS, **changed: Any) -> Header:
    """A Gemma 4 of two layers with a window and one without; or what is read of its assistant."""
    keys = {
        "block_count": 3,
        "embedding_length": WIDTH,
        "attention__head_count": 8,
        "attention__head_count_kv": [4, 4, 2],
        **{f"attention__{of}_length": 512 for of in ("key", "value")},
        **{f"attention__{of}_length_swa": 256 for of in ("key", "value")},
        "attention__sliding_window_pattern": [True, True, False],
    }
    tensors = {f"blk.{i}.attn_norm.weight": (WIDTH,) for i in range(3)}
    return header(
        architecture, {"token_embd.weight": (WIDTH, 4), **tensors}, tokens, **keys | changed
    )


def assistant(tokens: list[bytes] = TOKENS, **changed: Any) -> Header:
    keys: dict[str, Any] = {"nextn_predict_layers": 3, "embedding_length_out": WIDTH}
    keys["embedding_length"] = OWN_WIDTH
    return gemma("gemma4-assistant", tokens, **keys | changed)


def dflash(
    shapes: dict[str, Shape] | None = None,
    tokens: list[bytes] = TOKENS,
    **changed: Any,
) -> Header:
    """A DFlash head without its own ends, for inputs of two layers."""
    tensors: dict[str, Shape] = {"fc.weight": (2 * WIDTH, WIDTH), **(shapes or {})}
    keys = {
        "block_count": 2,
        "embedding_length": WIDTH,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
        "target_layers": [2, 5],
        "block_size": 8,
    }
    mask = {"tokenizer.ggml.mask_token_id": changed.pop("mask", 3)}
    given = {key: value for key, value in (keys | changed).items() if value is not None}
    made = header("dflash", tensors, tokens, **given)
    return replace(made, values=made.values | mask)


MARKOV: dict[str, Shape] = {"markov_w1.weight": (8, 4)}
SELECTOR: dict[str, Shape] = {"selector_hidden.weight": (WIDTH, 8)}
WINDOW = {"attention__sliding_window": 16, "attention__sliding_window_pattern": [False, True]}


@pytest.mark.parametrize(
    ("found", "block"),
    [
        (dflash(), Block(8, 3)),
        (dflash(block_size=None), Block(16, 3)),
        (dflash(attention__causal=True), Block(8, 3, is_causal=True)),
        (dflash(**WINDOW), Block(8, 3)),
        (dflash(rope__dimension_sections=[8, 0, 0, 0]), Block(8, 3)),
        (dflash(MARKOV), Block(8, 3, first=0)),
        (dflash(MARKOV, sample_from_anchor=False), Block(8, 3)),
        (dflash(MARKOV, block_size=100), Block(24, 3, first=0)),
        (dflash(SELECTOR, selector_top_k=4), Block(8, 3, n_candidates=4)),
    ],
)
def test_heads_that_draft_blocks_are_recognized(found: Header, block: Block) -> None:
    assert head_of(model(), found) == HeadFacts(
        "dflash", target_layers=(2, 5), borrows_output=True, block=block
    )
    assert is_head(found)


def vocabulary(of: Header, tokens: list[bytes]) -> Header:
    """The same header with other tokens."""
    return replace(of, values=of.values | {"tokenizer.ggml.tokens": tokens})


WITH_MTP = model("qwen35", n_mtp=1)
SIDECAR = sidecar(WITH_MTP)
BLOCKS = "head for models of width 64, blocks of 8 tokens"


def test_heads_in_files_of_their_own_are_recognized() -> None:
    assert head_of(model("qwen35"), SIDECAR) == head_of(WITH_MTP, SIDECAR) == HeadFacts("mtp", 1)
    assert head_of(model(), eagle3()) == HeadFacts("eagle3", 1, (2, 4, 5))
    assert head_of(gemma(), assistant()) == HeadFacts("mtp", shares_cache=True)
    assert is_head(model("qwen35", n_layers=0, n_mtp=1)), "its blocks may begin at 0"
    # As beside gpt-oss: its width by its number of heads is odd, and its heads are longer.
    lengths = {"attention__key_length": 8, "attention__value_length": 8}
    assert head_of(model(), eagle3(attention__head_count=32, **lengths))


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        (SIDECAR, "an MTP head without a model"),
        (eagle3(), "an EAGLE-3 head for models of width 64, layers 2, 4, 5"),
        (assistant(), "a Gemma 4 assistant (an MTP head) for models of width 64"),
        (dflash(), f"a DFlash {BLOCKS}"),
        (dflash(MARKOV), f"a DSpark {BLOCKS}"),
        (dflash(SELECTOR, selector_top_k=4), f"a DFlash2 {BLOCKS}"),
    ],
)
def test_a_file_of_a_head_is_no_model(draft: Header, text: str) -> None:
    assert is_head(draft)
    assert head_text(draft) == f"is {text}"
    kind = re.split(" for| without| \\(", text)[0]
    with pytest.raises(ModelError, match=f"is {kind}, not a model.*--draft"):
        check_model(draft)


@pytest.mark.parametrize(
    ("target", "draft"),
    [(model("qwen35"), SIDECAR), (model(), eagle3()), (gemma(), assistant()), (model(), dflash())],
)
def test_a_head_needs_the_targets_vocabulary(target: Header, draft: Header) -> None:
    """It may have more padding, with its own output, and not less."""
    for tokens in ([b"x", *TOKENS[1:]], TOKENS[:-1]):
        with pytest.raises(VocabError, match="another vocabulary"):
            head_of(target, vocabulary(draft, tokens))
    if draft is SIDECAR:
        assert head_of(target, vocabulary(draft, [*TOKENS, b"pad"]))


def test_rows_of_a_block_are_no_more_than_a_draft_needs() -> None:
    found = head_of(model(), dflash())
    anchored = head_of(model(), dflash(MARKOV))
    assert found is not None
    assert anchored is not None
    assert [found.n_rows(n) for n in (1, 3, 7, 8, 64)] == [2, 4, 8, 8, 8]
    assert [anchored.n_rows(n) for n in (1, 3, 7, 8, 64)] == [1, 3, 7, 8, 8]
    assert HeadFacts("mtp").n_rows(7) == 1


def test_a_head_that_drafts_blocks_may_have_its_own_ends() -> None:
    output, embeddings = {"output.weight": (WIDTH, 4)}, {"token_embd.weight": (WIDTH, 4)}
    reduced = {"output.weight": (WIDTH, N_OWN), "d2t": (N_OWN,)}
    for shapes in (output, embeddings, reduced, reduced | embeddings):
        found = head_of(model(), dflash(dict(shapes)))
        assert found is not None
        assert not found.borrows_output


def test_padding_and_a_mask_that_only_the_head_has_need_its_own_ends() -> None:
    padded = [*TOKENS, b"pad"]
    own: dict[str, Shape] = {"output.weight": (WIDTH, 5)}
    head_of(model(), dflash(own, padded))
    with pytest.raises(ModelError, match="for 5 tokens, and the target's output has 4"):
        head_of(model(), dflash(tokens=padded))
    with pytest.raises(ModelError, match="mask token 4 the target does not have"):
        head_of(model(), dflash(own, padded, mask=4))
    head_of(model(), dflash(own | {"token_embd.weight": (WIDTH, 5)}, padded, mask=4))


REFUSED: list[tuple[Header, Header, str]] = [
    (model(), SIDECAR, "of the architecture qwen35, and the target of llama"),
    (model("qwen35"), sidecar(WITH_MTP, embedding_length=32), "32 wide, and the target 64"),
    (model("qwen35"), sidecar(WITH_MTP, nextn_predict_layers=2, block_count=10), "has no MTP head"),
    (model(), assistant(), "for gemma4, and the target is llama"),
    (gemma(embedding_length=48), assistant(), "of width 64, and the target has 48"),
    (gemma(), assistant(nextn_predict_layers=2), "its header is not that of an assistant"),
    (gemma(), assistant(rope__dimension_count_swa=258), "rotate 258 dimensions of 256"),
    (gemma(), assistant(embedding_length=WIDTH), "its header is not that of an assistant"),
    (gemma(attention__sliding_window_pattern=[True, False, False]), assistant(), "last layers"),
    (gemma(), assistant(attention__sliding_window_pattern=[False] * 3), "none of its layers"),
    (gemma(), assistant(attention__sliding_window_pattern=2), "not a list of 3 layers"),
    (
        gemma(),
        assistant(attention__head_count_kv=[4, 4, 1]),
        "layer 2 reads 1 KV head of 512 .*2 has 2 KV",
    ),
    (
        gemma(),
        assistant(attention__key_length_swa=128),
        "layer 0 reads 4 KV heads of 128 .*1 has 4",
    ),
    (gemma(), assistant(attention__head_count=6), "no whole number of heads"),
]
REFUSED += [
    (model(), made, why)
    for made, why in [
        (eagle3(target_layers=[2, 4]), "its target_layers are .2, 4.; they must be three"),
        (eagle3(target_hidden_size=128), "of width 128, and the target has 64"),
        (eagle3(block_count=2), "it has 2 layers"),
        (eagle3(attention__value_length=4), "keys and values have different lengths"),
        (eagle3({"fc.weight": (64, 32)}), "fc.weight is 64 wide; it must be 192"),
        (eagle3({"fc.weight": None}), "fc.weight is missing"),
        (eagle3({"token_embd.weight": None}), "32 wide without its own token_embd"),
        (eagle3({"token_embd.weight": (32, 3)}), "4 rows of 32 in token_embd.weight"),
        (eagle3({"output.weight": (32, 3)}), "2 rows of 32 in output.weight; it has 3"),
        (eagle3(rope__dimension_count=7), "rotate 7 dimensions"),
        (eagle3(rope__dimension_count=10), "rotate 10 dimensions of 8"),
        (dflash(hyper_connection_count=4), "DSpark head of DeepSeek-V4, which is not"),
        (dflash(embedding_length=32), "32 wide, and the target 64"),
        (dflash(target_layers=None), "target_layers are None; they must be a list"),
        (dflash(target_layers=[-1, 5]), "the target has layers 0 to 7"),
        (dflash(mask=4), "its mask token is 4"),
        (dflash(block_size=1), "its blocks have 1 tokens"),
        (dflash(MARKOV, block_size=None), "no block_size, which DSpark heads need"),
        (dflash(SELECTOR, selector_top_k=8), "it scores 8 candidates for each token"),
        (dflash(SELECTOR, selector_top_k=5), "it scores 5 of 4 tokens"),
        (dflash({"fc.weight": (64, 64)}), "fc.weight is 64 x 64; it must be 128 x 64"),
        (dflash({"output.weight": (64, 3)}), "output.weight is 64 x 3; it must be 64 x 4"),
        (dflash({"d2t": (2,)}), "for 2 tokens, and the target's output has 4"),
        (dflash({"d2t": (2, 2), "output.weight": (64, 2)}), "must be a list of I64"),
        (dflash(attention__value_length=4), "keys and values have different lengths"),
        (
            dflash(**WINDOW | {"attention__sliding_window_pattern": [False, False, True]}),
            "none of its layers has its win",
        ),
        (dflash(attention__head_count_kv=[2, 1]), "different head_count_kvs"),
        (dflash(attention__head_count_kv=3), "it has 4 heads for 3 KV heads"),
        (dflash(rope__dimension_sections=[0, 0, 0, 8]), "rotate sections of .0, 0, 0, 8."),
    ]
]


@pytest.mark.parametrize(("target", "draft", "why"), REFUSED)
def test_a_head_that_does_not_fit_is_refused(target: Header, draft: Header, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        head_of(target, draft)


@pytest.mark.parametrize(("made", "before"), [(eagle3, [2, 4]), (dflash, [2])])
def test_a_head_needs_inputs_of_target_layers(made: Callable[..., Header], before: Any) -> None:
    with pytest.raises(ModelError, match="does not give for the architecture gemma3"):
        head_of(model("gemma3"), made())
    head_of(model("qwen35", n_mtp=1), made(target_layers=[*before, 8]))
    with pytest.raises(ModelError, match="the target has layers 0 to 8"):
        head_of(model("qwen35", n_mtp=1), made(target_layers=[*before, 9]))
