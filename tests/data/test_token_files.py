"""Tokenizers and token files: text survives a round trip, and invalid files are rejected."""

import itertools
import json
import os
import pickle
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data import (
    BYTES,
    TokenFile,
    find_tokenizer,
    load_data,
    prepare,
    prepare_data,
    read_stream,
    token_files,
)
from moe_dualpipe.data.encode import encode_documents
from moe_dualpipe.data.files import LOCK_FILE, only_writer
from moe_dualpipe.data.tokenizer import (
    UnknownTokenizer,
    digest,
    dtype_for,
    num_bytes,
    read_tokenizer,
    tokenizer_files,
    tokenizer_from_json,
)
from tests.support.mutations import check_message, mutations
from tests.support.texts import TEXTS, with_special_tokens


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """30 documents in a .jsonl file, and two folders with their token ids: BPE and bytes."""
    root = tmp_path_factory.mktemp("prepared")
    lines = [{"text": f"{i} " + "".join(TEXTS[(i + j) % 5] * (j + 1) for j in range(9))} for i in range(30)]
    (root / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind, size in (("bpe", 320), ("bytes", 1)):
        prepare_data([str(root / "a.jsonl")], root / kind, kind, size, "text")
    return root


# ---- Tokenizers ----


def test_text_survives_a_round_trip_and_never_encodes_to_the_end_token(prepared, tmp_path):
    for tokenizer, texts in ((BYTES, TEXTS), (find_tokenizer(prepared / "bpe"), [*TEXTS, "<|endoftext|>" * 3, ""])):
        for text in [*texts, "".join(map(chr, range(1, 900)))]:
            (array,) = tokenizer.encode_batch([text])
            tokens = array.tolist()
            assert tokenizer.decode(tokens) == text and tokenizer.end_id not in tokens
            assert array.dtype == (np.uint8 if tokenizer is BYTES else np.uint16)
            two = np.array([*tokens, tokenizer.end_id, *tokens], array.dtype)
            assert num_bytes(tokenizer, two) == 2 * len(text.encode()) + 1
    assert (tokenizer.vocab_size, tokenizer.end_id, str(tokenizer)) == (320, 0, "BPE of 320 tokens")
    assert len(tokenizer.encode(TEXTS[0] * 9)) < len(TEXTS[0] * 9) / 2
    assert BYTES.decode([0xFF, 65, 300]) == "\ufffdA\ufffd"  # a model may have a larger vocabulary
    unknown = tokenizer_from_json(UnknownTokenizer(77).to_json(), "here")
    assert (unknown.vocab_size, unknown.end_id, unknown.encode(unknown.decode([5, 0, 76]))) == (77, -1, [5, 0, 76])
    assert find_tokenizer(tmp_path) is BYTES is tokenizer_from_json(BYTES.to_json(), "here")
    assert [dtype_for(size) for size in (256, 257, 1 << 16, (1 << 16) + 1)] == ["u1", "<u2", "<u2", "<u4"]


EOS = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True}}
PUBLISHED = {  # whether texts begin with <s>, files beside tokenizer.json: the tokens at a start and at an end
    "template": (True, {}, [320], 0),
    "eos": (False, {"tokenizer_config.json": EOS | {"add_bos_token": True}}, [], 321),
    "both": (True, {"tokenizer_config.json": EOS | {"add_bos_token": False}}, [320], 321),
    "map": (True, {"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, [320], 323),
    "config": (
        None,
        {"config.json": {"eos_token_id": [322, 0]}, "tokenizer_config.json": {"bos_token": "<s>"}},
        [],
        322,
    ),
}


def publish(prepared, folder: Path, name: str) -> Path:
    """A folder with the tokenizer `name` of PUBLISHED."""
    template, files, *_ = PUBLISHED[name]
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    trained = (prepared / "bpe" / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(with_special_tokens(trained, 320, template))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_transformers_whatever_begins_and_ends_a_text(prepared, tmp_path, name):
    """Of prompts, of documents with and without special tokens, and of the files that a checkpoint has."""
    transformers = pytest.importorskip("transformers")
    folder, (start, end) = publish(prepared, tmp_path / "model", name), PUBLISHED[name][2:]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    chat = "<|im_start|>user\nä <s> </s><|im_end|>"
    tokenizer = find_tokenizer(folder)
    assert (tokenizer.start_ids, tokenizer.end_id) == (start, end)
    (tmp_path / "again").mkdir()
    for file, content in tokenizer_files(tokenizer).items():
        (tmp_path / "again" / file).write_bytes(content)
    again = find_tokenizer(tmp_path / "again")
    assert digest(again) == digest(tokenizer) == digest(pickle.loads(pickle.dumps(tokenizer)))
    for text in (*TEXTS, chat, "a <|end|>"):
        assert tokenizer.encode(text) == again.encode(text) == theirs(text).input_ids
        for special in (True, False):
            (found,) = encode_documents([text], again, special)
            assert [*found.tokens_N] == [*theirs(text, split_special_tokens=not special).input_ids, end]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert num_bytes(tokenizer, found.tokens_N) == found.text_bytes


def test_options_read_special_tokens_in_chats_as_one_id(prepared, tmp_path):
    model, chat = publish(prepared, tmp_path / "model", "both"), tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"text": f"<|im_start|>{i}<|im_end|>" * 9}) + "\n" for i in range(9)))
    for option, count in (([], 0), (["--special-tokens"], 81)):
        out = tmp_path / f"out{count}"
        command = ["data", "prepare", str(chat), "--out", str(out), "--tokenizer", str(model / "tokenizer.json")]
        assert main([*command, *option]) == 0
        text = load_data([str(chat), str(out)], 8, special_tokens=bool(option))
        for source in text.sources:
            whole = np.concatenate([source.train.streams[0][:], source.held_out.streams[0][:]])
            assert [(whole == token).sum() for token in (320, 321, 322, 323)] == [9, 9, count, count]


def test_a_published_model_without_tokenizer_json_is_named_and_takes_ids():
    missing = UnknownTokenizer(9, "kimi/tokenizer.json")
    assert missing.encode(" 17 4") == [17, 4] and UnknownTokenizer(9).encode("\n") == [0]
    for tokenizer, reason in ((missing, "there is no kimi/tokenizer.json"), (UnknownTokenizer(9), "the tokenizer of")):
        for text in ("Hello", "17 apples", *["\n"] * (tokenizer is missing)):
            with pytest.raises(ValueError, match=rf"^cannot encode text: {reason}.* use token ids, such as '17 4' in"):
                tokenizer.encode(text)


def changed(prepared, path, **parts) -> Path:
    content = json.loads((prepared / "bpe" / "tokenizer.json").read_text())
    content["model"] |= parts.pop("model", {})
    path.write_text(json.dumps(content | parts))
    return path


def words(**parts):
    return {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "a": 1}, "unk_token": "?", **parts}


SPLIT = {"type": "WhitespaceSplit"}
TOKENIZERS = {
    "no unknown token": ({"model": words(), "pre_tokenizer": SPLIT}, "cannot encode text: .*Missing"),
    "unknown is end": ({"model": words(unk_token="<|endoftext|>"), "pre_tokenizer": SPLIT},
                       r"encodes text to its end-of-document token, .* the text starts with 'b <\|endo"),
    "end in text": ({"model": words(vocab={"<|endoftext|>": 0, "?": 1}), "pre_tokenizer": SPLIT},
                    "encodes text to its end-of-document token"),
    "pattern": ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                                   "invert": False}}, "is not a tokenizer: .*parenthesis"),
    "panic when used": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}},
                        "(cannot encode text|is not a tokenizer): "),
    "panic when read": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
                        "is not a tokenizer: "),
    "nested": ({"decoder": json.loads('{"a":' * 300 + "0" + "}" * 300)}, "is not a tokenizer: "),
}  # fmt: skip


BROKEN = {
    "end": (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}', "no end-of-document token: "),
    "{": (b"{", "is not a tokenizer: "), "[]": (b"[]", "is not a tokenizer: neither the tokenizers library"),
    "ids": (b'{"tokenizer": "ids", "vocab_size": true}', "is not a "), "model": (b'{"model": {}}', "is not a "),
    "utf-16": (b"\xff\xfe{\0}\0", "is not a tokenizer: "), "nested": (b"[" * 100_000, "is not a tokenizer: "),
}  # fmt: skip


@pytest.mark.parametrize("name", [*TOKENIZERS, *BROKEN])
def test_a_tokenizer_that_fails_is_named_in_one_line(prepared, tmp_path, name):
    path = tmp_path / "t\n.json"
    if name in TOKENIZERS:
        parts, problem = TOKENIZERS[name]
        changed(prepared, path, **parts)
    else:
        content, problem = BROKEN[name]
        path.write_bytes(content)
    (tmp_path / "a.txt").write_text("b <|endoftext|> a")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/t\\n.json (has )?{problem}") as error:
        prepare_data([str(tmp_path / "a.txt")], tmp_path / "out", str(path), 1, "text")
    assert str(error.value).isprintable() and not (tmp_path / "out").exists()


def test_bpe_with_dropout_encodes_the_same_text_to_the_same_tokens(prepared, tmp_path):
    tokenizer = read_tokenizer(changed(prepared, tmp_path / "t.json", model={"dropout": 0.5}))
    expected = find_tokenizer(prepared / "bpe").encode(TEXTS[0] * 20)
    assert all(tokenizer.encode(TEXTS[0] * 20) == expected for _ in range(5))


# ---- Prepared token ids ----


@pytest.mark.parametrize("kind,dtype", [("bpe", "uint16"), ("bytes", "uint8")])
def test_prepared_token_ids_decode_to_the_documents(prepared, kind, dtype):
    tokenizer = find_tokenizer(prepared / kind)
    texts = [json.loads(line)["text"] for line in (prepared / "a.jsonl").read_text().splitlines()]
    held_out = [texts.pop(19)]  # by its hash
    for name, documents in (("train", texts), ("held_out", held_out)):
        file = TokenFile.open(prepared / kind / f"{name}.bin", "uint32")
        stream, size = file.tokens_N[:], sum(len(text.encode()) + 1 for text in documents)
        parts = np.split(stream, np.flatnonzero(stream == tokenizer.end_id) + 1)
        assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == [*documents, ""]
        sidecar = file.sidecar
        assert sidecar and (sidecar.dtype, sidecar.documents, sidecar.bytes) == (dtype, len(documents), size)
    assert np.array_equal(read_stream(str(prepared / kind), tokenizer)[0][:], stream)  # for an evaluation
    both = load_data([str(prepared / kind), str(prepared / "a.jsonl")], 8)  # the same text, encoded at load time
    for side in ("train", "held_out"):
        first, second = (getattr(source, side).streams[0][:] for source in both.sources)
        assert first.dtype == second.dtype and np.array_equal(first, second)
    first, second = (source.bytes_per_token for source in both.sources)
    assert first == pytest.approx(second) == pytest.approx(both.bytes_per_token)


def test_the_end_of_the_text_is_held_out_if_there_are_few_documents(tmp_path):
    text = "".join(TEXTS) * 40
    (tmp_path / "a.txt").write_text(text)
    done = prepare_data([str(tmp_path / "a.txt")], tmp_path / "out", "bpe", 280, "text")
    tokenizer, sidecars = done.tokenizer, done.sidecars
    streams = [TokenFile.open(tmp_path / "out" / f"{name}.bin", "uint8").tokens_N[:] for name in ("train", "held_out")]
    whole = np.concatenate(streams)
    assert tokenizer.decode(whole[:-1].tolist()) == text
    assert len(streams[1]) == len(whole) // 20
    assert [(s.tokens, s.documents) for s in sidecars] == [(len(streams[0]), 0), (len(streams[1]), 1)]
    assert sum(s.bytes for s in sidecars) == len(text.encode()) + 1
    assert sidecars[1].bytes == num_bytes(tokenizer, streams[1])


def test_refusals_of_the_data_commands_are_one_line_and_leave_nothing(prepared, tmp_path, refused):
    out, source = prepared / "bpe", str(prepared / "a.jsonl")
    (tmp_path / "x.bin").write_bytes(b"1234")
    (tmp_path / "one").write_text("a")
    for arguments, problem in [
        (["prepare", source, "--out", str(out)], f"--out {out} already exists and is not empty: choose another folder"),
        (["prepare", source, "--out", f"{out}2", "--vocab-size", "256"], "--vocab-size must be at least 257"),
        (["prepare", source, "--out", f"{out}2", "--field", "body"], f"{source}:1: no field 'body'"),
        (["prepare", source, "--out", f"{out}2", "--tokenizer", source], f"{source} is not a tokenizer: "),
        (["prepare", f"{tmp_path}/nothing", "--out", f"{out}2"], f"{tmp_path}/nothing: no such file or folder"),
        (["prepare", "--out", f"{out}2"], "name at least one SOURCE of text: a file, a folder, a glob, or "),
        (["prepare", source, "--out", f"{tmp_path}/one/x"], f"cannot write to --out {tmp_path}/one/x: Not a directory"),
        (["prepare", source, "--out", "a" * 5000], f"cannot write to --out {'a' * 200}…: File name too long"),
        (["prepare", source, "--out", "/proc"], "--out /proc already exists and is not empty"),
        (["prepare", source, "--out", f"{out}2", "--workers", "0"], "--workers must be at least 1: got 0"),
        (["check"], "name at least one FILE of token ids, such as corpus/train.bin"),
        (["check", f"{out}/gone.bin"], f"cannot read {out}/gone.bin: No such file or directory"),
        (["check", str(tmp_path / "x.bin")], f"cannot check {tmp_path}/x.bin: there is no x.bin.json next to it"),
    ]:
        assert refused("data", *arguments).startswith(problem)
    assert not [*tmp_path.glob(".*"), *prepared.glob(".*")]


def test_two_processes_do_not_prepare_one_folder(prepared, tmp_path):
    locked = only_writer(tmp_path / "out", tmp_path / ".out.unfinished" / LOCK_FILE)
    with locked, pytest.raises(ValueError, match=f"^{tmp_path}/out is being written by process {os.getpid()} on "):
        prepare_data([str(prepared / "a.jsonl")], tmp_path / "out", "bytes", 1, "text")


@pytest.mark.parametrize("call", range(6))
def test_a_disk_that_is_full_at_any_moment_loses_nothing(prepared, tmp_path, monkeypatch, call):
    """Five files are synced: the shard, and the two results and their descriptions."""
    calls = itertools.count()

    def fsync(_):
        if next(calls) == call:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    arguments = [str(prepared / "a.jsonl")], tmp_path / "out", "bytes", 1, "text"
    if call < 5:
        with pytest.raises(OSError, match="No space left"):
            prepare_data(*arguments)
        assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"] * (call >= 1)
    done = prepare_data(*arguments)
    assert done.finished_before == (1 <= call < 5) and [path.name for path in tmp_path.iterdir()] == ["out"]
    for path in (prepared / "bytes").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


# ---- Invalid token files ----


def describe(folder, **changes):
    path = folder / "train.bin.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("change,problem", [
    (lambda p: describe(p, dtype="uint32"), "train.bin has .*token ids|not a multiple of 4, the size of uint32"),
    (lambda p: describe(p, dtype="float64"), "cannot read .*train.bin.json: .*dtype"),
    (lambda p: describe(p, tokens=17), "train.bin has [0-9]+ uint16 token ids, but train.bin.json says 17"),
    (lambda p: describe(p, crc32=[]), "train.bin.json has 0 checksums"),
    (lambda p: (p / "train.bin.json").write_text("{"), "cannot read .*train.bin.json: it is not JSON: "),
    (lambda p: (p / "train.bin").write_bytes(b""), "train.bin has 0 uint16 token ids, but"),
    (lambda p: (p / "train.bin").write_bytes(b"123"), "train.bin has 3 bytes, not a multiple of 2, the size of uint16"),
    (lambda p: (p / "tokenizer.json").unlink(), "not encoded with bytes, and there is no .*tokenizer.json$"),
    (lambda p: (p / "tokenizer.json").write_bytes(BYTES.to_json()), "not encoded with bytes, the tokenizer in"),
    (lambda p: (p / "held_out.bin.json").unlink() or (p / "held_out.bin").write_bytes(b"\xff" * 600),
     "held_out.bin: token 0 is 65535, outside the vocabulary of 320"),
    (lambda p: (p / "train.bin").unlink(), "cannot read .*train.bin: No such file"),
    (lambda p: (p / "held_out.bin").unlink() or (p / "held_out.bin").mkdir(), "held_out.bin: it is not a regular file"),
], ids=map(str, range(12)))  # fmt: skip
def test_a_modified_folder_is_rejected(prepared, tmp_path, change, problem):
    shutil.copytree(prepared / "bpe", tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(ValueError, match=problem):
        load_data(str(tmp_path), 8)


def test_every_wrong_value_in_a_sidecar_is_refused_or_does_not_matter(prepared, tmp_path):
    shutil.copytree(prepared / "bytes", tmp_path, dirs_exist_ok=True)
    path, accepted = tmp_path / "train.bin", set()
    for what, text in mutations(json.loads((tmp_path / "train.bin.json").read_text())):
        (tmp_path / "train.bin.json").write_text(text)
        try:
            file = TokenFile.open(path, "uint16")
            file.scan(file.tokenizer(file.sidecar.vocab_size).vocab_size)
        except ValueError as error:
            check_message(error)
        else:
            accepted.add(what.split("'")[1])
            assert min(file.sidecar.vocab_size, file.sidecar.documents, file.sidecar.bytes) >= 0
    # As the tokenizer has them; counts for reports; a missing null.
    assert accepted <= {"vocab_size", "end_id", "documents", "bytes", "flags_crc32"}


def test_a_bare_token_file_has_the_given_dtype(tmp_path):
    tokens = np.arange(3000) * 7 % 1000
    tokens.astype("<u2").tofile(tmp_path / "train.bin")
    (tokens[::-1] + 1).astype("<u2").tofile(tmp_path / "val.bin")  # as nanoGPT names them
    text = load_data(str(tmp_path), 8, vocab_size=1001)
    assert text.sources[0].train.streams[0][:].tolist() == tokens.tolist()
    assert text.sources[0].held_out.streams[0][:].tolist() == (tokens[::-1] + 1).tolist()
    assert (text.tokenizer.end_id, str(text.tokenizer)) == (-1, "1,001 token ids without a tokenizer")
    with pytest.raises(ValueError, match=r"val.bin: token 142 is 1000, outside the vocabulary of 1000: "):
        load_data(str(tmp_path), 8, vocab_size=1000)
    with pytest.raises(ValueError, match=r"cannot encode the text in --data: there is no tokenizer.json n"):
        load_data([str(tmp_path), "LICENSE"], 8, 1001)
    tokens.astype("<u4").tofile(tmp_path / "wide.bin")
    alone = load_data(str(tmp_path / "wide.bin"), 8, 1000, dtype="uint32")
    parts = [alone.sources[0].train.streams[0][:], alone.sources[0].held_out.streams[0][:]]
    assert [*map(len, parts)] == [2850, 150] and np.array_equal(np.concatenate(parts), tokens)


INTEGERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def write_megatron(path: Path, kind: int, documents: list[list[list[int]]]) -> None:
    """NAME.bin and NAME.idx as Megatron-LM writes them: documents, each of sequences."""
    sequences, dtype = list(itertools.chain(*documents)), np.dtype(INTEGERS.get(kind, "<f4"))
    path.write_bytes(np.array(list(itertools.chain(*sequences)), dtype).tobytes())
    lengths, counts = [*map(len, sequences)], [*map(len, documents)]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, kind, len(lengths), len(counts) + 1)
    index += np.array(lengths, "<i4").tobytes() + (np.cumsum([0, *lengths])[:-1] * dtype.itemsize).tobytes()
    index += np.cumsum([0, *counts]).tobytes()
    path.with_suffix(".idx").write_bytes(index)


@pytest.mark.parametrize("kind", INTEGERS)
def test_megatrons_files_are_read_by_their_index(prepared, tmp_path, kind):
    """Of any integers, with the end token that all documents have; the option for bare files does not matter."""
    documents = [[[i % 90 + 1] * (i % 4), [5, i % 90, 100]] for i in range(1, 41)]
    path, stream = tmp_path / "a_text_document.bin", list(itertools.chain(*itertools.chain(*documents)))
    write_megatron(path, kind, documents)
    text = load_data(str(path), 8, vocab_size=101, dtype="uint32")
    assert [*text.sources[0].train.streams[0][:], *text.sources[0].held_out.streams[0][:]] == stream
    assert text.tokenizer.end_id == tokenizer_from_json(text.tokenizer.to_json(), "here").end_id == 100
    with pytest.raises(ValueError, match="token 3 is 100, outside the vocabulary of 100"):
        load_data(str(path), 8, vocab_size=100)
    shutil.copy(prepared / "bpe" / "tokenizer.json", tmp_path)
    with pytest.raises(
        ValueError, match=r"documents of .*bin do not end with token 0 of .*: write them .* --append-eod"
    ):
        load_data(str(path), 8)
    write_megatron(path, kind, [[[7, 8, 0]]] * 40)
    assert load_data(str(path), 8).tokenizer.end_id == 0
    (tmp_path / "tokenizer.json").unlink()
    write_megatron(path, kind, [[[7, 8, 7]]] * 40)
    assert load_data(str(path), 8).tokenizer.end_id == -1


@pytest.mark.parametrize("change,problem", [
    (lambda index: index[:-9], "is not an index of integers that Megatron-LM wrote"),
    (lambda index: index[:20], "is not an index"), (lambda index: b"TNTI" + index[4:], r"\(MMIDIDX\): move it away"),
    (lambda index: index[:17] + b"\7" + index[18:], "is not an index of integers"),
    (lambda index: index[:17] + b"\4" + index[18:], "is not an index of integers"),
    (lambda index: index[:34] + b"\3" + index[35:], "is not an index"), (lambda index: index[:0], "is not an index"),
])  # fmt: skip
def test_an_index_that_does_not_fit_is_refused_until_it_is_moved_away(tmp_path, change, problem):
    path = tmp_path / "a.bin"
    write_megatron(path, 8, [[[1, 2], [3]]] * 30)
    index = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(change(index))
    with pytest.raises(ValueError, match=problem):
        load_data(str(path), 8)
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"a.bin has 89 uint16 token ids, but .*a.idx says 90"):
        load_data(str(path), 8)
    path.with_suffix(".idx").unlink()
    assert len(load_data(str(path), 8).sources[0].train) > 50


def test_sequences_of_a_file_too_large_to_scan_are_checked_when_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SCAN_LIMIT", 100)
    tokens = np.zeros(400, "<u2")
    tokens[150] = 300
    tokens.tofile(tmp_path / "a.bin")
    text = load_data(str(tmp_path / "a.bin"), 198, vocab_size=300)
    with pytest.raises(ValueError, match=r"a.bin: token 150 is 300, outside the vocabulary of 300: "):
        text.batch(0, 0, 1, 198)
    assert not text.held_out_batch(0, 4, 4, 198)[0].any()


def test_sources_with_two_tokenizers_and_a_vocabulary_that_is_too_small_are_errors(prepared):
    bpe, other = str(prepared / "bpe"), str(prepared / "bytes")
    for sources, size, problem in (
        ([bpe, other], None, "must have the same tokenizer: .*bin has BPE of 320 tokens, .* has bytes; "),
        (bpe, 319, r"--data \(BPE of 320 tokens\) needs model\.vocab_size 320: got 319"),
    ):
        with pytest.raises(ValueError, match=problem):
            load_data(sources, 8, size)
    load_data(bpe, 8, vocab_size=999)


def test_corrupt_token_files_are_rejected(prepared, tmp_path, monkeypatch):
    """By their name, and with the part in which they have changed."""
    for module in (token_files, prepare):
        monkeypatch.setattr(module, "CHUNK", 64)
    prepare_data([str(prepared / "a.jsonl")], tmp_path / "a", "bytes", 1, "text")
    path, random = tmp_path / "a" / "train.bin", np.random.default_rng(1)
    right = path.read_bytes()
    for at in (0, 63, 64, *random.integers(0, len(right), 20).tolist()):
        path.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        first = at // 64 * 64
        changed = re.escape(
            f"{path} has changed in tokens {first} to {min(first + 63, len(right) - 1)}: prepare it again"
        )
        with pytest.raises(ValueError, match=changed):
            load_data(str(tmp_path / "a"), 8)
