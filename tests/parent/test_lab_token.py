"""The token for the hub: kept where only its user reads it, and found where workers look."""

import stat
from pathlib import Path

import pytest

from parent.library.hub_token import HubToken
from shared.errors import ErrorCode, Refused


def test_a_lab_token_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    token = HubToken(tmp_path / "data")
    assert (token.is_kept(), token.env()) == (False, {})
    token.keep("  hf_one\n")
    assert token.path.read_text() == "hf_one"
    assert stat.S_IMODE(token.path.stat().st_mode) == 0o600
    assert token.env() == {
        "HF_TOKEN": "",
        "HUGGING_FACE_HUB_TOKEN": "",
        "HF_TOKEN_PATH": str(tmp_path / "data" / "hf-token"),
    }
    token.path.chmod(0o644)
    token.keep("hf_two")
    assert stat.S_IMODE(token.path.stat().st_mode) == 0o600
    assert [path.name for path in token.path.parent.iterdir()] == ["hf-token"]
    token.forget()
    token.forget()
    assert not token.is_kept()


@pytest.mark.parametrize("text", ["", "  ", "two words", "hf_\x00", "hf_ü", "x" * 513, "a\nb"])
def test_what_is_no_lab_token_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Refused) as refused:
        HubToken(tmp_path).keep(text)
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
    assert text.strip() == "" or text not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_user_s_own_lab_token_counts_too(tmp_path: Path) -> None:
    token, home = HubToken(tmp_path / "data"), tmp_path / "home"
    file = home / ".cache" / "huggingface" / "token"
    assert not token.has_any({}, home)
    assert token.has_any({"HF_TOKEN": "hf_a"}, home)
    file.parent.mkdir(parents=True)
    file.write_text("hf_b")
    assert token.has_any({}, home)
    assert not token.has_any({"HF_HOME": str(tmp_path / "other")}, home)
    assert token.has_any({"HF_HOME": str(tmp_path / "other"), "HF_TOKEN_PATH": str(file)}, home)
    assert token.has_any({"HF_HOME": str(file.parent)}, tmp_path)
