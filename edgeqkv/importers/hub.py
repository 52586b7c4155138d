"""``hf:OWNER/NAME[/FILE]``: a checkpoint on the Hugging Face Hub, or in its local cache."""

from __future__ import annotations

from pathlib import Path

from edgeqkv.errors import CheckpointError, MissingDependencyError, first_line

PREFIX = "hf:"
_SUFFIXES = (".pt", ".pth")


def fetch(source: str) -> Path:
    """Download (or find in the cache) the file that ``source`` names.

    Without FILE the repository's only ``.pt`` or ``.pth`` file is taken.

    Raises:
        CheckpointError: malformed, not found, offline and not cached, or several candidates.
        MissingDependencyError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise MissingDependencyError(
            f"{source} needs huggingface_hub: pip install 'edgeqkv[hub]'"
        ) from None
    owner, _, rest = source.removeprefix(PREFIX).partition("/")
    name, _, file = rest.partition("/")
    if not owner or not name:
        raise CheckpointError(
            f"{source} is not hf:OWNER/NAME or hf:OWNER/NAME/FILE; give one of them"
        )
    repo = f"{owner}/{name}"
    try:
        file = file or _only_checkpoint(source, repo)
        return Path(huggingface_hub.hf_hub_download(repo, file))
    except errors.EntryNotFoundError as e:
        if isinstance(e, errors.LocalEntryNotFoundError):
            raise CheckpointError(
                f"{source}: the Hub cannot be reached and {file} is not in the local cache; "
                "connect, or download it and import the file"
            ) from None
        raise CheckpointError(
            f"{source}: {repo} has no file {file}; name one of those that the Hub lists"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{source}: no repository {repo}, or it is private; check the name, or log in (hf auth login)"
        ) from None
    except (
        ValueError
    ) as e:  # such as a path that leads out of the repository; last, for the others are some too
        if not isinstance(e, errors.HFValidationError):
            raise CheckpointError(
                f"{source}: {file!r} is no file name; name one of those that the Hub lists"
            ) from None
        raise CheckpointError(
            f"{source}: {repo!r} is not a repository name; give OWNER/NAME as the Hub shows it"
        ) from None
    except (errors.HfHubHTTPError, OSError) as e:
        first = first_line(e)[:200]
        raise CheckpointError(
            f"{source}: download failed: {first}; try again, or download the file and import it"
        ) from None


def _only_checkpoint(source: str, repo: str) -> str:
    files = [f for f in _list_files(source, repo) if f.endswith(_SUFFIXES)]
    if len(files) == 1:
        return files[0]
    found = ", ".join(sorted(files)) or "none"
    raise CheckpointError(
        f"{source}: {repo} has {len(files)} files ending in .pt or .pth: {found}; "
        f"name one as hf:{repo}/FILE"
    )


def _list_files(source: str, repo: str) -> list[str]:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return [str(f) for f in huggingface_hub.list_repo_files(repo)]
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise
    except Exception:  # no network, by whichever HTTP library's name: what is cached must do
        try:
            folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
        except (errors.LocalEntryNotFoundError, OSError):
            raise CheckpointError(
                f"{source}: the Hub cannot be reached and {repo} is not in the local cache; "
                "connect, or download the file and import it"
            ) from None
        return [f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()]
