"""A hub that takes what it is given, and has no model card yet."""

from collections import namedtuple

from huggingface_hub.errors import LocalEntryNotFoundError


def stand_in(monkeypatch, upload=lambda **_: None):
    """For the length of a test, in place of the hub; `upload` in place of `upload_folder`."""

    def no_card(*args, **kwargs):
        raise LocalEntryNotFoundError("no card")

    repository = namedtuple("Repository", "repo_id")
    monkeypatch.setattr("huggingface_hub.create_repo", lambda name, **_: repository(f"me/{name}"))
    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    monkeypatch.setattr("diffusers.utils.hub_utils.ModelCard.load", no_card)
