"""Every wrong value in the JSON beside token ids: an error of one line, or the same tokens."""

import json

from moe_dualpipe.data import BYTES, TokenFile, prepare_data
from moe_dualpipe.data.tokenizer import UnknownTokenizer, tokenizer_from_json
from tests.support.mutations import check_message, mutations


def prepared(tmp_path, tokenizer="bytes"):
    (tmp_path / "text.txt").write_text("some text, some more text\n" * 40)
    prepare_data([str(tmp_path / "text.txt")], tmp_path / "out", tokenizer, 300, "text")
    return tmp_path / "out" / "train.bin"


def test_every_wrong_value_in_a_sidecar_is_refused_or_does_not_matter(tmp_path):
    path = prepared(tmp_path)
    described = path.with_name("train.bin.json")
    saved, accepted = json.loads(described.read_text()), set()
    for what, text in mutations(saved):
        described.write_text(text)
        try:
            file = TokenFile.open(path, "uint16")
            file.scan(file.tokenizer(file.sidecar.vocab_size).vocab_size)
        except ValueError as error:
            check_message(error)
        else:
            accepted.add(what.split("'")[1])
            assert file.tokenizer(256) is BYTES
    assert accepted <= {"vocab_size", "end_id", "documents", "bytes"}  # as the tokenizer has them; counts for reports


def test_every_wrong_value_in_a_tokenizer_is_refused_or_gives_a_tokenizer():
    for saved in ({"tokenizer": "bytes"}, {"tokenizer": "ids", "vocab_size": 300}):
        for _, text in mutations(saved):
            try:
                found = tokenizer_from_json(text.encode(), "tokenizer.json")
            except ValueError as error:
                check_message(error)
            else:
                assert found is BYTES or (isinstance(found, UnknownTokenizer) and type(found.vocab_size) is int)
