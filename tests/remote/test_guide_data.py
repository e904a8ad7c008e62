"""The code of docs/from-one-gpu.md that reads S3."""

import os

import metaflow
import pytest
from pages import blocks_of


@pytest.mark.s3
def test_the_download_with_metaflows_client(tmp_path):
    root = f"{os.environ['METAFLOW_DATATOOLS_S3ROOT']}/guides"
    with metaflow.S3(s3root=root) as s3:
        s3.put_many([("0.bin", "zero"), ("some/1.bin", "one")])
    (code,) = [block.text for block in blocks_of("docs/from-one-gpu.md") if "s3.get_all()" in block.text]
    around: dict = {}
    exec(code, around)
    around["download"](root, str(tmp_path / "here"))
    assert (tmp_path / "here" / "0.bin").read_text() == "zero"
    assert (tmp_path / "here" / "some" / "1.bin").read_text() == "one"
