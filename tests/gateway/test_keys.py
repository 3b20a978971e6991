"""Handles name one lease; a key opens one handle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway import BadHandle, episode_key, handle_of, lease_of, opens

printable = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=80)


@given(printable, st.integers(0, 10**14))
def test_a_handle_says_which_lease(episode_id: str, fence: int) -> None:
    handle = handle_of(episode_id, fence)
    assert lease_of(handle) == (episode_id, fence)
    assert all(one.isalnum() or one in "-_" for one in handle)


@given(st.text(max_size=40))
def test_whatever_else_is_refused(text: str) -> None:
    try:
        episode_id, fence = lease_of(text)
    except BadHandle:
        return
    assert handle_of(episode_id, fence) == text


def test_a_key_opens_its_own_paths_only() -> None:
    mine, other = handle_of("train/0#0", 7), handle_of("train/0#0", 8)
    key = episode_key("token", mine)
    assert opens("token", f"/episodes/{mine}/v1/chat/completions", key)
    assert opens("token", f"/episodes/{mine}", key)
    for path in (f"/episodes/{other}/v1/models", "/episodes", "/episodes/", "/generate", f"/x/episodes/{mine}/v1"):
        assert not opens("token", path, key), path
    assert not opens("token", "/episodes//v1", episode_key("token", ""))
    assert not opens("another token", f"/episodes/{mine}/v1", key)
    assert not opens("token", f"/episodes/{mine}/v1", "\udce9é")


@pytest.mark.parametrize("length", [64])
def test_a_key_is_a_whole_hmac(length: int) -> None:
    assert len(episode_key("token", "handle")) == length
