from __future__ import annotations

import subprocess
import sys

import pytest

from latentry.errors import LatentryError, MissingPackageError
from latentry.extras import EXTRAS, missing_packages, require_extra


def test_installed_extras():
    for extra in EXTRAS:
        assert missing_packages(extra) == []
        require_extra(extra)


def test_missing_packages_are_named_with_the_install_command(monkeypatch):
    for package in ("av", "simplejpeg"):
        monkeypatch.setitem(sys.modules, package, None)  # how Python marks a module that cannot be imported
    assert missing_packages("encode") == ["av", "simplejpeg"]
    with pytest.raises(MissingPackageError) as raised:
        require_extra("encode")
    assert str(raised.value) == "this needs av, simplejpeg; install them with: pip install 'latentry[encode]'"
    assert isinstance(raised.value, LatentryError)
    assert isinstance(raised.value, ImportError)
    with pytest.raises(MissingPackageError, match=r"this needs av; install it with: pip install"):
        require_extra("encode", ["av", "PIL"])
    require_extra("encode", ["PIL"])


def run_without(packages: list[str], code: str) -> str:
    """Run code in an interpreter that cannot import some packages; the last line of its standard error."""
    block = "import sys\n" + "".join(f"sys.modules[{package!r}] = None\n" for package in packages)
    done = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("code", ["import latentry.media", "import latentry; latentry.VideoOptions"])
def test_media_without_the_encode_extra(code):
    assert run_without(["av", "simplejpeg"], code) == (
        "latentry.errors.MissingPackageError: this needs av, simplejpeg; "
        "install them with: pip install 'latentry[encode]'"
    )


def test_core_modules_need_no_extra():
    packages = [package for extra in EXTRAS.values() for package in extra]
    code = (
        "import latentry.storage, latentry.buckets, latentry.sources.captions, latentry.sources.folder\n"
        "latentry.buckets.MultiTierBucketCalculator().assign([64], [64])"
    )
    assert run_without(packages, code) == ""


def test_cropping_without_pillow_names_the_install_command():
    code = (
        "import numpy, latentry\n"
        "latentry.MultiTierBucketCalculator().resize_and_crop(numpy.zeros((9, 9, 3), 'uint8'), 4, 4)"
    )
    assert run_without(["PIL"], code) == (
        "latentry.errors.MissingPackageError: this needs PIL; install it with: pip install 'latentry[encode]'"
    )
