"""Images: Dockerfiles, OCI layouts and registries; and a world's way out."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

import strands_env
from strands_env.sandbox import (
    IMAGE_LIMITS,
    Image,
    ImageError,
    SandboxUnavailableError,
    World,
    build_image,
    load_image,
    pull_image,
)
from strands_env.sandbox.dockerfile import expand, ignores, read_dockerfile, words
from strands_env.sandbox.images import once
from strands_env.sandbox.world import pack
from support.oci import LAYER, Layout, Registry, archive_of, archive_of_folder, make_root, member
from support.worlds import needs_worlds, worlds_folder

IS_ROOT = os.geteuid() == 0
pytestmark = needs_worlds
folder = pytest.fixture(autouse=True)(worlds_folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Provide the files of a small system."""
    return make_root(tmp_path_factory.mktemp("root"))


@pytest.fixture
async def base(root):
    return await load_image(root)


@pytest.fixture
def context(tmp_path):
    """Provide a function that writes the files of a context, and returns its folder."""

    def write(dockerfile, **files):
        made = tmp_path / "context"
        for name, content in {"Dockerfile": dedent(dockerfile), **files}.items():
            path = made / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return made

    return write


async def build_on(base, context, **options):
    return await build_image(context, images={"base": base}, network="none", **options)


async def output_of(image, command, **options):
    async with World(image) as world:
        return (await world.execute(command, **options)).output


# --- Dockerfiles ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b", ["a", "b"]),
        ("'$A b' \"$A b\" $A", ["$A b", "1 b", "1"]),
        (r"\$A a\ b \"", ["$A", "a b", '"']),
        (r'"\$A \" \n"', [r"$A \" \n".replace("\\\"", '"')]),
        ("${A}x$A_y ${B:-$A} ${A:-2} ${A:+3} ${B:+4}", ["1x", "1", "1", "3", ""]),
        ("${A:-${B}} ${B:-${A}} ${B-x} ${A+y} ${EMPTY-x} ${EMPTY:-x}", ["1", "1", "x", "y", "", "x"]),
        ("x='a b'c", ["x=a bc"]),
        ("", []),
    ],
)  # fmt: skip
def test_words_of_an_instruction(text, expected):
    assert words(text, {"A": "1", "EMPTY": ""}) == expected


def test_a_quote_that_is_not_closed_is_an_error():
    with pytest.raises(ImageError, match="not closed"):
        words("it's", {})


def test_variables_that_are_not_there_are_empty():
    assert expand("[$A${B}]", {}) == "[]"


@pytest.mark.parametrize(
    ("pattern", "ignored", "kept"),
    [
        ("*.pyc", ["a.pyc"], ["d/a.pyc", "a.py"]),
        ("**/*.pyc", ["a.pyc", "d/e/a.pyc"], ["a.pyx"]),
        ("/d/", ["d", "d/a"], ["e/d", "da"]),
        ("d/**\n!d/keep", ["d/a"], ["d/keep", "d"]),
        ("a?[0-9]", ["ab1"], ["ab", "abc"]),
        ("./a//b\n.", ["a/b", "a/b/c"], ["b"]),
        ("# no\n\nx+", ["x+"], ["xx", "# no"]),
    ],
)
def test_dockerignore(pattern, ignored, kept):
    is_ignored = ignores(pattern)
    assert [path for path in (*ignored, *kept) if is_ignored(path, False)] == ignored


def test_a_folder_without_exceptions_is_left_out_whole():
    is_ignored = ignores("*\n!/src/keep\n")
    folders = (".", "src", "src/keep", "src/other", "lib")
    assert [path for path in folders if is_ignored(path, True)] == ["src/other", "lib"]
    assert not ignores("*\n!**/keep\n")("lib", True)


def test_lines_continue_over_comments_and_here_documents_stay_whole():
    text = "FROM a\nRUN one \\\n  # no\n\n  two\nRUN <<E\n# yes\nx\nE\nRUN cat <<-'E' > /x\n\ty\n\tE\nUSER z\n"
    _, [stage] = read_dockerfile(text)
    found = [(each.line, each.text) for each in stage.instructions]
    assert found == [(2, "one   two"), (6, "# yes\nx"), (10, "cat <<-'E' > /x\ny\nE"), (13, "z")]


def test_what_is_quoted_has_no_here_document_and_two_backslashes_do_not_continue():
    text = "FROM a\nHEALTHCHECK --interval=5s CMD true\nRUN echo '1 <<x' \" <<y\"\nRUN a\\\\\nRUN cat <<E-F\n\f\nE-F\n"
    _, [stage] = read_dockerfile(text)
    assert [each.line for each in stage.instructions] == [2, 3, 4, 5]
    assert stage.instructions[-1].text == "cat <<E-F\n\f\nE-F"


async def test_a_dockerfile_does_what_it_does_in_docker(base, context):
    made = context(
        """\
        ARG BASE=base
        FROM ${BASE} AS builder
        RUN mkdir /out && echo built > /out/file && ln -s /etc/passwd /out/link
        FROM never-needed AS other
        FROM base
        ARG VERSION=1 OTHER
        ENV GREETING="hello $VERSION" LITERAL='$VERSION'
        ENV OLD form of it
        WORKDIR /app
        WORKDIR inner
        RUN echo "$GREETING $VERSION" > greeting
        COPY app.py src/ /task/
        COPY --chown=5:7 --chmod=711 app.py /task/other.py
        COPY app.py /usr/bin
        COPY --from=builder /out /copied
        COPY . /all
        RUN ["sh", "-c", "echo exec > /exec"]
        RUN <<END
        set -e
        echo here > /here
        END
        ADD app.py .
        LABEL a=b
        EXPOSE 80
        CMD ["true"]
        """,
        **{"app.py": "print()", "src__a": "a", "src__.hidden": "h", "secret": "s", ".dockerignore": "secret\n"},
    )
    image = await build_on(base, made, args={"VERSION": "2"})
    command = """cat greeting /here /exec /copied/file; echo "$LITERAL|$OLD|$PATH"; ls -A /task /all /copied .;
        stat -c '%u %g %a' /task/other.py /task/app.py; ls /usr/bin/app.py; ls -l /copied/link"""
    output = await output_of(image, command)
    assert output.startswith("hello 2 2\nhere\nexec\nbuilt\n$VERSION|form of it|/usr/local/sbin:")
    listed = (await output_of(image, "ls -A /task /all /copied .")).split()
    assert listed == (
        ".: app.py greeting /all: .dockerignore Dockerfile app.py src /copied: file link "
        "/task: .hidden a app.py other.py"
    ).split()  # fmt: skip
    assert ("5 7 711" if IS_ROOT else "0 0 711") in output and "/copied/link -> /etc/passwd" in output
    assert (image.working_dir, image.user) == ("/app/inner", "root")


@pytest.mark.skipif(not IS_ROOT, reason="an ordinary user's worlds have one user")
async def test_instructions_run_as_their_user(base, context):
    made = context(
        """\
        FROM base
        RUN mkdir /home /home/agent && chmod 777 /home/agent
        USER agent
        RUN id -u > /home/agent/id
        COPY --chown=agent Dockerfile /mine
        """
    )
    image = await build_on(base, made)
    assert await output_of(image, "cat ~/id; id -u; stat -c %u /mine") == "1000\n1000\n1000\n"


@pytest.mark.skipif(not IS_ROOT, reason="an ordinary user's worlds have one user")
async def test_a_working_folder_belongs_to_the_user_who_asks_for_it(base, context):
    made = context("FROM base\nRUN mkdir /there\nUSER agent\nWORKDIR /there\nWORKDIR /new/inner\nRUN touch file\n")
    image = await build_on(base, made)
    listed = await output_of(image, "pwd; stat -c '%u %a' /there /new . file")
    assert listed == "/new/inner\n0 755\n1000 755\n1000 755\n1000 644\n"


async def test_a_pattern_may_match_nothing_and_a_dot_names_a_folder(base, context):
    made = context("FROM base\nCOPY a lock* /new/.\nCOPY b /other/.\nCOPY none* /\n", a="a", b="b")
    assert await output_of(await build_on(base, made), "cat /new/a /other/b") == "ab"


async def test_folders_links_and_arguments_are_as_in_docker(base, context):
    made = context(
        """\
        FROM base AS origin
        RUN echo real > /real && ln -s real /link
        FROM scratch AS whole
        COPY --from=origin / /
        FROM whole
        ARG EMPTY= GIVEN=default
        RUN set -u; echo "[$EMPTY$GIVEN]" > /arguments
        COPY --from=origin /link /copied
        WORKDIR /made
        WORKDIR /
        COPY --chown=5:7 a /new/inner/
        COPY . /twice
        COPY . /twice
        RUN ln -s /arguments /over
        COPY a /over
        """,
        a="a",
        **{".dockerignore": "a\n!a\n0\n"},
    )
    os.link(made / "a", made / "0")  # is left out, so `a` may not be a link to it
    os.link(made / "a", made / "b")
    image = await build_on(base, made, args={"GIVEN": ""})
    output = await output_of(image, "cat /copied /real /arguments /twice/a /twice/b /over; stat -c '%u %n' /made /new")
    assert output == f"real\nreal\n[]\naaa0 /made\n{5 if IS_ROOT else 0} /new\n"


async def test_much_output_is_fine(base, context):
    made = context("FROM base\nCOPY text /\nRUN for i in 1 2 3; do cat /text; done\n", text="x" * 1_000_000)
    assert await build_on(base, made)


async def test_a_file_that_changes_while_it_is_copied_is_an_error(base, context, monkeypatch):
    made = context("FROM base\nCOPY a /\n", a="a")
    with monkeypatch.context() as patch:
        patch.setattr("strands_env.sandbox.images.pack", lambda *given: [(made / "a").write_text("b"), pack(*given)])
        with pytest.raises(ImageError, match="line 2: COPY a /: a file changed while it was copied"):
            await build_on(base, made)
    assert await output_of(await build_on(base, made), "cat /a") == "b"


async def test_a_fork_of_the_process_does_not_keep_others_from_a_layer(base, context):
    made = context("FROM base\nRUN sleep 0.5; exit 1\n")
    building = asyncio.create_task(build_on(base, made))
    await asyncio.sleep(0.3)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        for build in (building, build_on(base, made)):
            with pytest.raises(ImageError, match="exit code 1"):
                await asyncio.wait_for(build, 10)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def test_what_was_built_is_kept_until_a_file_or_an_instruction_changes(base, context):
    ran = []

    async def build(**files):
        ran.clear()
        made = context(text, **files)
        await build_on(base, made, on_output=lambda _, data: ran.append(data))
        return b"".join(ran).split()

    text = "FROM base\nRUN echo 1\nCOPY data /\nRUN echo 2\n"
    assert await build(data="a") == [b"1", b"2"]
    assert await build(data="a") == []
    (Path(context(text), "data")).touch()
    assert await build() == []
    assert await build(data="b") == [b"2"]
    text = text.replace("echo 1", "echo 3")
    assert await build() == [b"3", b"2"]


async def test_builds_at_the_same_time_make_a_layer_once(base, context):
    made = context("FROM base\nRUN echo once\n")
    ran = []
    builds = [build_on(base, made, on_output=lambda _, data: ran.append(data)) for _ in range(5)]
    first, *others = await asyncio.gather(*builds)
    assert ran == [b"once\n"]
    assert all([layer.name for layer in each.layers] == [layer.name for layer in first.layers] for each in others)


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("RUN true", "line 1: RUN true: it comes before FROM"),
        ("# empty", "no FROM"),
        ("RAN\nONBUILD RUN true", "line 3: ONBUILD RUN true: not supported"),
        ("RAN\nRUN --mount=type=secret,id=x true", "line 3: RUN true: --mount=type=secret,id=x is not supported"),
        ("RAN\nRUN --mount=type=cache,target=/c --mount=type=bind,target=/b true", "--mount="),
        ("RAN\nRUN --network=host true", "--network=host is not supported"),
        ("FROM --platform=linux/s390x base", "--platform=linux/s390x is not supported"),
        ("RAN\nCOPY --chmod=u+x a /", r"--chmod=u\+x is not supported"),
        ("RAN\nCOPY --parents a /", "--parents=true is not supported"),
        ("RAN\nCOPY --from=base /usr/*.so /", "patterns of another image's files are not supported"),
        ("RAN\nADD https://example.org/x /", "fetch it with RUN"),
        ("RAN\nRUN <<EOF\necho", "line 3: the here-document does not end: no line is EOF"),
        ("RAN\nRUN <<EOF\n#!/bin/cat\nEOF", "another interpreter is not supported"),
        ("RAN\nENV A=${B%.*}", "this form of a variable is not supported"),
        ("RAN\nUSER", "an argument is missing"),
        ("RAN\nENV", "an argument is missing"),
        ("RAN\nCOPY Dockerfile", "an argument is missing"),
        ("RAN\nCOPY <<EOF /x\na\nEOF", "line 3: here-documents of COPY are not supported"),
        ("# escape=`\nFROM base", "escape character"),
    ],
)
async def test_what_is_not_supported_is_refused_before_anything_runs(base, context, dockerfile, why):
    ran = []
    made = context(dockerfile.replace("RAN", "FROM base\nRUN echo ran"))
    with pytest.raises(ImageError, match=why):
        await build_on(base, made, on_output=lambda *piece: ran.append(piece))
    assert not ran


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("RUN echo why >&2; exit 3", "line 2: RUN echo why.*: exit code 3\nwhy"),
        ("RUN sleep 1000", "it exceeded the limit on timeout"),
        ("COPY missing /", "the context has no missing"),
        ("COPY ../outside /", "is outside of the context"),
        ("COPY link /", "is outside of the context"),
        ("COPY hidden /", "the context has no hidden"),
        ("ADD archive.tar /", "archives are not supported"),
        ("COPY --chown=missing a /", "Invalid argument" if IS_ROOT else ""),
        ("COPY a /etc/passwd/x", "Not a directory|File exists"),
        ("ENV A='b", "a quote is not closed"),
        ("SHELL /bin/sh", "not a list in JSON"),
    ],
)
async def test_a_build_that_fails_says_where_and_why(base, context, tmp_path, dockerfile, why):
    made = context(f"FROM base\n{dockerfile}\n", a="a", hidden="h", **{".dockerignore": "hidden"})
    (tmp_path / "outside").write_text("secret")
    (made / "link").symlink_to(tmp_path / "outside")
    with tarfile.open(made / "archive.tar", "w") as archive:
        archive.add(made / "a")
    if not why:
        pytest.skip("an ordinary user's worlds have one user")
    limits = replace(IMAGE_LIMITS, wall_s=0.5 if "sleep" in dockerfile else 30.0)
    with pytest.raises(ImageError, match=f"(?s)Dockerfile: .*({why})"):
        await build_on(base, made, limits=limits)


async def test_a_dockerfile_may_be_elsewhere_and_must_exist(base, context, tmp_path):
    made = context("FROM scratch")
    (tmp_path / "Other").write_text("FROM base\nCOPY Dockerfile /copied")
    image = await build_on(base, made, dockerfile=tmp_path / "Other")
    assert await output_of(image, "cat /copied") == "FROM scratch"
    with pytest.raises(ImageError, match="No such file"):
        await build_image(tmp_path, network="none")


@pytest.mark.parametrize("name", ["Dockerfile", ".dockerignore"])
async def test_a_context_does_not_lead_to_files_outside(base, context, tmp_path, name):
    made = context("FROM base\n")
    (tmp_path / "outside").write_text("SECRET of this machine")
    (made / name).unlink(missing_ok=True)
    (made / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ImageError, match="leads out of the context$"):
        await build_on(base, made)


# --- layouts ---

HOSTILE = [
    member("out", type=tarfile.SYMTYPE, linkname="/../../../.."),
    member("out/tmp/made-by-an-image", b"x"),
    member("../../../tmp/made-by-an-image", b"x"),
    member("/tmp/made-by-an-image", b"x"),
    member("disk", type=tarfile.BLKTYPE, devmajor=8),
]


async def test_an_image_of_a_layout_has_its_files_and_settings(root, tmp_path):
    layout = Layout(tmp_path / "layout")
    second = archive_of(
        member("d", type=tarfile.DIRTYPE, mode=0o755),
        member("d/.wh..wh..opq"),
        member("d/new", b"new"),
        member(".wh.gone"),
        member("lib2/through-link", b"linked"),
        member("hard", b"twice", mode=0o4755),
        member("hard2", type=tarfile.LNKTYPE, linkname="hard", mode=0o4755),
        member("file", b"now a file"),
    )
    first = archive_of(
        member("d/old", b"old"), member("d/e/old", b"old"), member("gone/x", b"x"), member("file/x", b"x"),
        member("lib", type=tarfile.DIRTYPE, mode=0o755), member("lib2", type=tarfile.SYMTYPE, linkname="lib"),
    )  # fmt: skip
    layers = (archive_of_folder(root), first, second)
    layout.add("app", *layers, Env=["A=b=c"], WorkingDir="/d", User="1000" if IS_ROOT else "")
    image = await load_image(tmp_path / "layout")
    command = "pwd; ls; cat new /lib/through-link /file /hard2; ls /gone; echo $A; stat -c '%h %a' /hard; id -u"
    output = await output_of(image, command)
    assert output.startswith("/d\nnew\nnewlinkednow a filetwiceb=c\n2 4755\n" + ("1000" if IS_ROOT else "0"))
    assert "cannot access '/gone'" in output


async def test_an_image_with_an_empty_list_of_hosts_knows_its_own(root, tmp_path):
    layout = Layout(tmp_path / "layout")
    layout.add("empty", archive_of_folder(root), archive_of(member("etc/hosts", b"")))
    assert "127.0.0.1 localhost" in await output_of(await load_image(tmp_path / "layout"), "cat /etc/hosts")


async def test_a_link_to_a_root_is_the_root(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert (await load_image(tmp_path / "link")).layers[0].name == (await load_image(root)).layers[0].name


async def test_a_hostile_layer_stays_in_its_image(root, tmp_path):
    layout = Layout(tmp_path / "layout")
    layout.add("hostile", archive_of_folder(root), archive_of(*HOSTILE))
    image = await load_image(tmp_path / "layout")
    assert await output_of(image, "cat /tmp/made-by-an-image; ls /disk 2>&1 | cat") == (
        "xls: cannot access '/disk': No such file or directory\n"
    )
    assert not Path("/tmp/made-by-an-image").exists()


async def test_an_image_is_chosen_by_its_name(root, tmp_path):
    layout = Layout(tmp_path / "layout")
    for name in ("one", "two"):
        layout.add(name, archive_of_folder(root), archive_of(member("name", name.encode())))
    image = await load_image(tmp_path / "layout", reference="two")
    assert await output_of(image, "cat /name") == "two"
    with pytest.raises(ImageError, match="'one', 'two'"):
        await load_image(tmp_path / "layout")


@pytest.mark.parametrize("what", ["architecture", "kind", "blob", "index", "archive", "bomb", "no folder"])
async def test_a_layout_that_cannot_be_used_says_why(tmp_path, what):
    layout = Layout(tmp_path / "layout")
    kind = "application/vnd.oci.image.layer.v1.tar+zstd" if what == "kind" else LAYER
    layer = archive_of(member("big", bytes(64 << 20)))
    if what == "archive":
        layer = b"no archive"
    elif what != "bomb":
        layer = archive_of(member("x", b"x"))
    found = layout.add(
        "a", layer, layer_type=kind, **({"architecture": "s390x"} if what == "architecture" else {})
    )  # fmt: skip
    if what == "blob":
        layout.path(found).write_bytes(b"{}")
    if what == "index":
        (layout.folder / "index.json").write_text("[")
    why = {
        "architecture": "not for linux/", "kind": r"tar\+zstd are not supported", "blob": "damaged",
        "index": "JSONDecodeError", "archive": "Bad message|not a gzip", "bomb": "disk", "no folder": "not a folder",
    }[what]  # fmt: skip
    path = layout.folder / "missing" if what == "no folder" else layout.folder
    with pytest.raises(ImageError, match=why):
        await load_image(path, limits=replace(IMAGE_LIMITS, disk_bytes=8 << 20))


async def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    if not IS_ROOT:
        pytest.skip("only root mounts a small disk")
    layout = Layout(tmp_path / "layout")
    layout.add("big", archive_of(member("big", os.urandom(32 << 20))))
    code = "import asyncio, sys; from strands_env.sandbox import load_image; asyncio.run(load_image(sys.argv[1]))"
    script = 'mount -t tmpfs -o size=16m,mode=755 none "$STRANDS_ENV_WORLDS" && "$@"; ls "$STRANDS_ENV_WORLDS"'
    worlds = tmp_path / "worlds"
    worlds.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(strands_env.__file__).parents[1])}
    environment["STRANDS_ENV_WORLDS"] = str(worlds)
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", code, tmp_path / "layout"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "ImageError" in ran.stderr and "No space left on device" in ran.stderr
    assert [name for name in ran.stdout.split() if "." not in name] == ["lock"]


# --- registries ---


@pytest.fixture
def layout(root, tmp_path):
    """Provide a layout with an image `app:1` of two layers."""
    made = Layout(tmp_path / "layout")
    made.add("1", archive_of_folder(root), archive_of(member("name", b"pulled")))
    return made


async def test_an_image_is_pulled_once(layout):
    with Registry(layout) as registry:
        image = await pull_image(f"127.0.0.1:{registry.port}/team/app:1")
        assert await output_of(image, "cat /name") == "pulled"
        asked = len(registry.asked)
        again = await pull_image(f"127.0.0.1:{registry.port}/team/app:1")
    assert [layer.name for layer in again.layers] == [layer.name for layer in image.layers]
    assert sum("/blobs/" in path for path in registry.asked[asked:]) == 1  # its configuration


async def test_a_dockerfile_pulls_its_base(layout, context):
    with Registry(layout) as registry:
        made = context(f"FROM 127.0.0.1:{registry.port}/team/app:1\nRUN echo built > /built\n")
        image = await build_image(made, network="none")
    assert await output_of(image, "cat /name /built") == "pulledbuilt\n"


async def test_a_registry_is_asked_for_a_base_once(layout, context, folder):
    with Registry(layout) as registry:
        made = context(f"FROM 127.0.0.1:{registry.port}/team/app:1\n")
        await asyncio.gather(*(build_image(made) for _ in range(3)))
        assert sum("/manifests/" in path for path in registry.asked) == 2  # the first one finds out how to authorize
        shutil.rmtree(folder)
        assert await output_of(await build_image(made), "cat /name") == "pulled"


async def test_builds_that_wait_for_a_base_that_fails_fail_with_it(layout, context, monkeypatch):
    monkeypatch.setattr("strands_env.sandbox.registry.PAUSE_S", 0.0)
    with Registry(layout) as registry:
        registry.faults = ["unavailable"] * 4
        made = context(f"FROM 127.0.0.1:{registry.port}/team/app:1\n")
        outcomes = await asyncio.gather(*(build_image(made) for _ in range(3)), return_exceptions=True)
        assert ["after 4 attempts" in str(outcome) for outcome in outcomes] == [True] * 3
        assert sum("/blobs/" in path for path in registry.asked) == 4
        assert await output_of(await build_image(made), "cat /name") == "pulled"


async def test_a_folder_may_be_called_as_an_image(root, layout, monkeypatch):
    with Registry(layout) as registry:
        name = f"127.0.0.1:{registry.port}/team/app:1"
        (layout.folder / name).parent.mkdir(parents=True)
        (layout.folder / name).symlink_to(root)
        monkeypatch.chdir(layout.folder)
        loaded = [await once(load_image, folder) for folder in (name, Path(name))]
        assert loaded[0] is loaded[1]
        assert await once(pull_image, name) != loaded[0]


@pytest.mark.parametrize("fault", ["unavailable", "cut", "changed"])
async def test_a_fault_of_a_registry_is_tried_again(layout, fault, monkeypatch):
    monkeypatch.setattr("strands_env.sandbox.registry.PAUSE_S", 0.0)
    with Registry(layout) as registry:
        registry.faults = [fault]
        image = await pull_image(f"127.0.0.1:{registry.port}/team/app:1")
        assert await output_of(image, "cat /name") == "pulled"
        registry.faults = [fault] * 100
        with pytest.raises(ImageError, match="after 4 attempts"):
            await pull_image(f"127.0.0.1:{registry.port}/team/app:1")


async def test_a_registry_may_want_credentials(layout):
    with Registry(layout, ("user", "password")) as registry:
        name = f"127.0.0.1:{registry.port}/team/app:1"
        with pytest.raises(ImageError, match="gives no access: 401"):
            await pull_image(name)
        assert await pull_image(name, credentials=("user", "password"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("127.0.0.1:{port}/team/app:2", "answers 404 Not Found"),
        ("127.0.0.1:1/team/app", "ConnectError"),
        ("127.0.0.1:@example.org/a", "is not the name of an image"),
        ("Not A Name", "is not the name of an image"),
    ],
)
async def test_an_image_that_cannot_be_pulled_says_why(layout, name, why, monkeypatch):
    monkeypatch.setattr("strands_env.sandbox.registry.PAUSE_S", 0.0)
    with Registry(layout) as registry:
        with pytest.raises(ImageError, match=why):
            await pull_image(name.format(port=registry.port))


async def test_only_the_registry_itself_gets_credentials(layout):
    with Registry(layout, ("user", "password")) as other, Registry(layout, ("user", "password")) as registry:
        registry.leads_to = f"http://127.0.0.1:{other.port}"
        with pytest.raises(ImageError, match="wants credentials"):
            await pull_image(f"127.0.0.1:{registry.port}/team/app:1", credentials=("user", "password"))
    assert not any(path.startswith("/token") for path in other.asked)


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (b"x" * (17 << 20), "sends more than"),
        (b"[" * 100_000, "RecursionError"),
        (b'{"manifests": [1]}', "AttributeError"),
        (b'{"config": {"mediaType": "x", "digest": "%s"}, "layers": []}', "AttributeError"),
    ],
)
async def test_a_registry_may_be_hostile(layout, manifest, why):
    config = layout.blob(b'{"config": null}', "x")["digest"].encode()
    manifest = manifest.replace(b"%s", config)
    with Registry(layout) as registry:
        registry.manifest = manifest
        with pytest.raises(ImageError, match=why):
            await pull_image(f"127.0.0.1:{registry.port}/team/app:1")


async def test_a_layer_is_not_larger_than_its_manifest_says(layout, monkeypatch):
    monkeypatch.setattr(Layout, "blob", lambda self, *given, blob=Layout.blob: {**blob(self, *given), "size": 1})
    layout.add("2", archive_of(member("x", b"x")))
    with Registry(layout) as registry:
        with pytest.raises(ImageError, match="sends more than 1 bytes"):
            await pull_image(f"127.0.0.1:{registry.port}/team/app:2")


# --- the network ---


def test_a_public_network_reaches_what_this_machine_reaches_but_not_its_loopback():
    code = dedent("""
        import asyncio, socket, threading
        from strands_env.sandbox import World
        def serve(address):
            server = socket.create_server((address, 8000))
            def answer():
                while True:
                    server.accept()[0].sendall(address.encode())
            threading.Thread(target=answer, daemon=True).start()
        ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 8000), 5).recv(99).decode(), end='')"
        async def main():
            for address in ("203.0.113.5", "127.0.0.1"):
                serve(address)
            async with World(network="public") as world:
                for address in ("203.0.113.5", "127.0.0.1", "10.0.2.2"):
                    ran = await world.execute(["python3", "-c", ASK, address])
                    print(address, ran.exit_code, ran.stdout.decode())
                (fork,) = await world.fork()
                print((await fork.execute(["python3", "-c", ASK, "203.0.113.5"])).output)
                await fork.stop()
        asyncio.run(main())
    """)
    # In a network of the test's own, so that no address of this machine is used.
    script = 'ip link set lo up; ip addr add 203.0.113.5/32 dev lo; exec "$@"'
    command = ["unshare", "-n", "-r", "sh", "-c", script, "sh", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(strands_env.__file__).parents[1])}
    environment["STRANDS_ENV_WORLDS"] += "-2"
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines() == [
        "203.0.113.5 0 203.0.113.5",
        "127.0.0.1 1 ",
        "10.0.2.2 1 ",
        "203.0.113.5",
    ], ran


async def test_without_slirp4netns_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match="install slirp4netns"):
        await World(network="public").start()


async def test_a_world_without_an_image_has_nothing_of_the_machine():
    async with World(Image()) as world:
        ran = await world.execute("true")
    assert (ran.exit_code, ran.stderr) == (126, b"[Errno 2] No such file or directory: '/bin/sh'\n")
