"""Every kind of file becomes the picture a person sees, or an error that names it: pictures made here, expected values by hand."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from gradscope.data.images import MAX_PIXELS, TURNS, load_rgb, missing_pictures, names, refuse_missing
from gradscope.types import Record

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(secrets.randbits(31))


def array(path: Path) -> np.ndarray:
    image = load_rgb(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def halves() -> Image.Image:
    """40 x 20, left half blue and right half red."""
    picture = Image.new("RGB", (40, 20), BLUE)
    picture.paste(RED, (20, 0, 40, 20))
    return picture


# ---- orientation

#: Where the stored row 0 and column 0 belong, by the EXIF standard: (side of row 0, side of column 0).
SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def edge(picture: np.ndarray, side: str) -> np.ndarray:
    return {"top": picture[0], "bottom": picture[-1], "left": picture[:, 0], "right": picture[:, -1]}[side]


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "webp"])
@pytest.mark.parametrize("orientation", SIDES)
def test_orientation_is_applied(tmp_path, orientation, suffix):
    stored = np.full((24, 40, 3), 128, dtype=np.uint8)
    stored[:8], stored[8:, :8] = 255, 0  # a white first row, a black first column
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    options = {"quality": 100} if suffix in ("jpg", "webp") else {}
    Image.fromarray(stored).save(path, exif=exif, **options)
    shown = array(path)
    assert shown.shape == ((40, 24, 3) if orientation >= 5 else (24, 40, 3))
    row, column = SIDES[orientation]
    assert np.median(edge(shown, row)) > 250
    assert np.median(edge(shown, column)) < 5


def test_all_turns_are_known():
    assert set(TURNS) == set(SIDES) - {1}


@pytest.mark.parametrize("tag", [0, 9, 77])
def test_orientations_that_do_not_exist_are_upright(tmp_path, tag):
    exif = Image.Exif()
    exif[0x0112] = tag
    halves().save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(array(tmp_path / "a.png"), np.asarray(halves()))


@pytest.mark.parametrize(
    "damage", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12", b"Exif\0\0junk" * 9]
)
def test_damaged_metadata_do_not_stop_the_load_and_print_nothing(tmp_path, damage):
    halves().save(tmp_path / "a.jpg", quality=95, exif=damage)
    code = "import sys; from gradscope.data.images import load_rgb; print(load_rgb(sys.argv[1]).size)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.jpg"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("(40, 20)\n", "")


# ---- transparency


def transparent_files(folder: Path) -> list[Path]:
    """The left half is transparent over hidden red, the right half is opaque blue."""
    mask = Image.new("L", (40, 20), 255)
    mask.paste(0, (0, 0, 20, 20))
    hidden = Image.new("RGB", (40, 20), RED)
    hidden.paste(BLUE, (20, 0, 40, 20))
    rgba = hidden.copy()
    rgba.putalpha(mask)
    palette = Image.new("P", (40, 20), 0)
    palette.putpalette([*RED, *BLUE, *RED] + [0] * 753)
    palette.paste(1, (20, 0, 40, 20))
    rgba.save(folder / "rgba.png")
    rgba.save(folder / "rgba.webp", lossless=True, exact=True)
    rgba.save(folder / "rgba.tiff")
    palette.save(folder / "index.png", transparency=0)
    palette.save(folder / "table.png", transparency=bytes([0, 255, 0]))
    palette.save(folder / "index.gif", transparency=0)
    hidden.save(folder / "colour.png", transparency=RED)
    return sorted(folder.iterdir())


def test_transparency_shows_white_and_all_kinds_agree(tmp_path):
    expected = np.full((20, 40, 3), BLUE, dtype=np.uint8)
    expected[:, :20] = 255
    files = transparent_files(tmp_path)
    assert len(files) == 7
    for path in files:
        assert np.array_equal(array(path), expected), path.name


def test_half_transparent_is_mixed_with_white(tmp_path, rng):
    pixels = rng.integers(0, 256, (9, 7, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    colour, alpha = pixels[..., :3].astype(float), pixels[..., 3:].astype(float) / 255
    assert np.abs(array(tmp_path / "a.png") - (colour * alpha + 255 * (1 - alpha))).max() <= 1
    gray = Image.fromarray(pixels[..., :2])
    assert gray.mode == "LA"
    gray.save(tmp_path / "la.png")
    value, alpha = pixels[..., :1].astype(float), pixels[..., 1:2].astype(float) / 255
    assert np.abs(array(tmp_path / "la.png") - (value * alpha + 255 * (1 - alpha))).max() <= 1


# ---- depth and colour models


def test_sixteen_bits_are_scaled_not_cut(tmp_path, rng):
    values = rng.integers(0, 65536, (20, 30)).astype(np.uint16)
    values[0, :3] = 0, 65535, 257
    expected = np.rint(values / 257)
    Image.fromarray(values).save(tmp_path / "a.png")
    Image.fromarray(values).save(tmp_path / "a.tiff")
    Image.fromarray(values.astype(np.int32)).save(tmp_path / "i.tiff")
    for name in ("a.png", "a.tiff", "i.tiff"):
        assert np.array_equal(array(tmp_path / name), np.repeat(expected[..., None], 3, axis=2)), name


def test_float_gray(tmp_path, rng):
    unit = rng.random((5, 6)).astype(np.float32)
    unit[0, :2] = 0, 1
    Image.fromarray(unit).save(tmp_path / "unit.tiff")
    Image.fromarray(unit * 255).save(tmp_path / "levels.tiff")
    expected = np.rint(unit.astype(np.float64) * 255)
    for name in ("unit.tiff", "levels.tiff"):
        assert np.abs(array(tmp_path / name)[..., 0] - expected).max() <= 1


@pytest.mark.parametrize("values", [[0.0, 1000.0], [-1.0, 1.0], [float("nan"), 1.0]])
def test_gray_without_a_scale_is_refused(tmp_path, values):
    Image.fromarray(np.array([values], dtype=np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match=r"a.tiff' cannot be decoded: gray values .* no agreed brightness"):
        load_rgb(tmp_path / "a.tiff")


def test_cmyk_is_no_negative(tmp_path):
    for name, options in (("a.jpg", {"quality": 100}), ("a.tiff", {})):
        for inks, colour in (((0, 0, 0, 0), WHITE), ((0, 255, 255, 0), RED), ((255, 255, 0, 0), BLUE), ((0, 0, 0, 255), (0, 0, 0))):
            Image.new("CMYK", (16, 16), inks).save(tmp_path / name, **options)
            assert np.abs(array(tmp_path / name).astype(int) - colour).max() <= 3, (name, inks)


def ycck_jpeg(colour: tuple[int, int, int], black: int) -> bytes:
    """A CMYK JPEG with its inks written as Y, Cb, Cr and K, and marked so: what Adobe programs write."""
    r, g, b = colour
    ycc = (0.299 * r + 0.587 * g + 0.114 * b, 128 - 0.168736 * r - 0.331264 * g + 0.5 * b, 128 + 0.5 * r - 0.418688 * g - 0.081312 * b)
    file = BytesIO()
    # PIL stores 255 minus each ink. A decoder turns YCC back to r, g, b and 255 - r, ... to stored inks, which Adobe inverts.
    y, cb, cr = (round(v) for v in ycc)
    Image.new("CMYK", (16, 16), (255 - y, 255 - cb, 255 - cr, black)).save(file, "JPEG", quality=100)
    data = bytearray(file.getvalue())
    data[data.index(b"Adobe") + 11] = 2  # the colour transform: YCCK
    return bytes(data)


@pytest.mark.parametrize("colour", [(255, 255, 255), (255, 0, 0), (20, 90, 200)])
def test_ycck_is_no_negative(tmp_path, colour):
    (tmp_path / "a.jpg").write_bytes(ycck_jpeg(tuple(255 - c for c in colour), black=0))
    assert np.abs(array(tmp_path / "a.jpg").astype(int) - colour).max() <= 4


def test_lab(tmp_path):
    colours = Image.fromarray(np.array([[(200, 60, 40), (40, 90, 160), (128, 128, 128), (255, 255, 255)]], dtype=np.uint8))
    lab = ImageCms.profileToProfile(colours, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB")
    lab.save(tmp_path / "a.tiff")
    with Image.open(tmp_path / "a.tiff") as stored:
        assert stored.mode == "LAB"
    assert np.abs(array(tmp_path / "a.tiff").astype(int) - np.asarray(colours)).max() <= 10


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tiff"])
def test_animations_give_the_first_frame(tmp_path, suffix):
    options = {"lossless": True} if suffix == "webp" else {}
    Image.new("RGB", (8, 8), RED).save(
        tmp_path / f"a.{suffix}", save_all=True, append_images=[Image.new("RGB", (8, 8), BLUE)], **options
    )
    assert (array(tmp_path / f"a.{suffix}") == RED).all()


def test_one_pixel(tmp_path):
    Image.new("RGB", (1, 1), BLUE).save(tmp_path / "a.png")
    assert array(tmp_path / "a.png").tolist() == [[[0, 0, 255]]]


# ---- files that are no pictures


def png(width: int, height: int) -> bytes:
    """A PNG that declares this size and holds a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(300))) + chunk(b"IEND", b"")


BAD = {
    "empty": (b"", "the file is empty"),
    "web page": (b"\n<!DOCTYPE html><html>404</html>", "web page"),
    "text": (b"not found", "not a picture"),
    "bomb": (png(20_000, 20_000), f"{MAX_PIXELS:,} pixels"),
    "strip": (png(5000, 2), "5000 x 2 pixels is a strip"),
    "short": (png(300, 300), "truncated|incomplete|not enough"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named_with_a_reason(tmp_path, kind, recwarn):
    content, words = BAD[kind]
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^image '.*bad.jpg' cannot be decoded: .*({words})") as caught:
        load_rgb(path)
    assert "\n" not in str(caught.value)
    assert not recwarn.list


def test_jpegs_cut_anywhere_are_refused(tmp_path, rng):
    path = tmp_path / "a.jpg"
    Image.fromarray(rng.integers(0, 256, (64, 80, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    for length in rng.integers(1, len(whole) - 200, 20):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a.jpg' cannot be decoded"):
            load_rgb(path)


def test_a_large_picture_below_the_limit_warns_nobody(tmp_path, recwarn, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (15, 10), RED).save(tmp_path / "a.png")  # PIL warns from one to two times its limit
    assert load_rgb(tmp_path / "a.png").size == (15, 10)
    assert not recwarn.list


def test_what_is_no_file(tmp_path):
    (tmp_path / "x.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, words in (("x.jpg", "it is a folder"), ("pipe.jpg", "it is not a regular file")):
        with pytest.raises(ValueError, match=words):
            load_rgb(tmp_path / name)
    with pytest.raises(ValueError, match=r"gone\.jpg' does not exist"):
        load_rgb(tmp_path / "gone.jpg")


def _try_without_rights(path: Path, answer) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        load_rgb(path)
        answer.put("read")
    except ValueError as error:
        answer.put(str(error))


def test_no_permission(tmp_path):
    path = Path("/tmp") / f"locked-{secrets.token_hex(8)}.png"  # pytest's own folders are closed to other users
    halves().save(path)
    path.chmod(0)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    process = context.Process(target=_try_without_rights, args=(path, answer))
    process.start()
    try:
        assert answer.get(timeout=20).endswith("cannot be decoded: no permission to read it")
    finally:
        process.join()
        path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_bomb_costs_no_memory(tmp_path):
    (tmp_path / "a.png").write_bytes(png(20_000, 20_000))
    code = (
        "import sys\nfrom memory import mebibytes\nfrom gradscope.data.images import load_rgb\nbefore = mebibytes('VmHWM')\n"
        "try:\n    load_rgb(sys.argv[1])\nexcept ValueError:\n"
        "    print(mebibytes('VmHWM') - before)"
    )
    command = [sys.executable, "-c", code, tmp_path / "a.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert float(done.stdout) < 50  # MiB; the picture would be 1,100
    assert done.stderr == ""


# ---- pictures that are not there


def record(path: Path | str | None, identity: str = "a") -> Record:
    return Record(id=identity, image=None if path is None else str(path), captions=("a",))


def test_missing_pictures_are_counted_and_named(tmp_path):
    halves().save(tmp_path / "There.PNG")
    records = [record(tmp_path / "There.PNG"), record(tmp_path / "there.png"), record(None, "bare")]
    records += [record(tmp_path / f"gone{i}.png", str(i)) for i in range(12)]
    assert missing_pictures(records) == records[1:]
    with pytest.raises(ValueError, match="14 of 15 pictures do not exist") as caught:
        refuse_missing(records)
    said = str(caught.value)
    assert "there.png (there is 'There.PNG': only the case differs)" in said
    assert "record 'bare' names none" in said
    assert "gone7.png, and 4 more" in said
    assert "gone8" not in said
    assert names(records[3:5]) == f"{tmp_path}/gone0.png, {tmp_path}/gone1.png"
    refuse_missing(records[:1])
    with pytest.raises(ValueError, match=r"none of 2 records names a picture; .* --image-key"):
        refuse_missing([record(None, "1"), record(None, "2")])
    strange = [record("x" * 5000), record("a\0b"), record(tmp_path / "There.PNG" / "below.png")]
    assert missing_pictures(strange) == strange
