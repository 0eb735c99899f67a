"""A file of a data-set repository on the Hugging Face hub -> its address, size and hash.

The hub's own library finds the file, follows ``HF_ENDPOINT`` and reads the user's login; the bytes are then fetched by
``gradscope.data.transfer``, because that goes on after a cut where the library starts anew. The address is pinned to the commit
that was asked about, so a file does not change between two halves of a transfer.
"""

from __future__ import annotations

import os
import time

from gradscope.data.info import Download
from gradscope.data.transfer import BUSY, Patience, Remote

_SHA256_DIGITS, _SHA1_DIGITS = 64, 40


def hub_remote(download: Download, patience: Patience) -> Remote:
    """Where the file is and what it must hash to.

    Raises:
        ValueError: no such file or repository, access not granted, or the hub cannot be reached.
    """
    from httpx2 import RequestError
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    what = f"'{download.hub_file}' of the hub's data set '{download.hub}'"
    for attempt in range(1, patience.tries + 1):
        try:
            return _look_up(download)
        except GatedRepoError as error:
            raise ValueError(f"{what}: accept the terms on its page, then log in with `hf auth login`") from error
        except RepositoryNotFoundError as error:
            raise ValueError(f"{what}: no such data set, or it is private; log in with `hf auth login`") from error
        except HfHubHTTPError as error:
            busy = error.response is not None and error.response.status_code in BUSY
            why: Exception = error
        except (RequestError, OSError, ValueError) as error:  # OSError: no network, offline mode, no hub at HF_ENDPOINT
            busy, why = isinstance(error, RequestError), error
        if not busy or attempt == patience.tries:
            raise ValueError(f"{what} cannot be looked up: {' '.join(str(why).split())}") from why
        time.sleep(patience.pause * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _look_up(download: Download) -> Remote:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    endpoint = os.environ.get("HF_ENDPOINT") or None
    url = hf_hub_url(download.hub, download.hub_file, repo_type="dataset", endpoint=endpoint)
    found = get_hf_file_metadata(url, endpoint=endpoint)
    if found.commit_hash is None:
        raise ValueError(f"{url} is not answered by a hub; look at HF_ENDPOINT")
    etag = (found.etag or "").lower()
    return Remote(
        url=hf_hub_url(download.hub, download.hub_file, repo_type="dataset", revision=found.commit_hash, endpoint=endpoint),
        size=download.size if download.size is not None else found.size,
        sha256=download.sha256 or (etag if len(etag) == _SHA256_DIGITS else None),
        git_sha1=etag if len(etag) == _SHA1_DIGITS else None,
        headers={k: v for k, v in build_hf_headers(library_name="gradscope").items() if k == "authorization"},
    )
