"""Random programs in worlds, their snapshots and their forks, against an oracle that copies whole folders.

WORLD_PROGRAMS=10000 python -m pytest tests/property/test_worlds.py
"""

import asyncio
import os
import random
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from strands_env.sandbox import World
from support.worlds import needs_worlds

PROGRAMS = int(os.environ.get("WORLD_PROGRAMS", "400"))
STEPS = 10
NAMES = ("a", "b", "c", "d")

# One step of a program, as the world and the oracle do it: in the folder that is the current one.
APPLY = """
import os, shutil, sys
def move(first, second):
    try:
        os.replace(first, second)
    except OSError as error:  # an overlay does not rename folders of layers below: programs copy them, as `mv` does
        if error.errno != 18:
            raise
        if os.path.isdir(second) and not os.path.islink(second):
            os.rmdir(second)
        shutil.copytree(first, second, symlinks=True)
        shutil.rmtree(first)
def apply(steps):
    for kind, first, second, text in steps:
        try:
            if kind == "write":
                with open(first, "w") as file: file.write(text)
            elif kind == "append":
                with open(first, "a") as file: file.write(text)
            elif kind == "mkdir": os.mkdir(first)
            elif kind == "rename": move(first, second)
            elif kind == "link": os.link(first, second, follow_symlinks=False)
            elif kind == "symlink": os.symlink(text, first)
            elif kind == "chmod": os.chmod(first, int(text, 8), follow_symlinks=True)
            elif kind == "remove": os.unlink(first)
            elif kind == "rmtree": shutil.rmtree(first)
            elif kind == "replace":
                shutil.rmtree(first)
                os.mkdir(first)
        except (OSError, NotImplementedError):
            pass
"""
KINDS = ("write", "append", "mkdir", "rename", "link", "symlink", "chmod", "remove", "rmtree", "replace")
DONE: dict = {}
exec(APPLY, DONE)


def random_path(chance):
    return "/".join(chance.choice(NAMES) for _ in range(chance.randint(1, 3)))


def random_steps(chance):
    steps = []
    for _ in range(STEPS):
        kind = chance.choice(KINDS)
        text = chance.choice(NAMES) * chance.randint(1, 3)
        if kind == "chmod":
            text = chance.choice(("700", "755", "711"))
        if kind == "symlink":
            text = chance.choice(NAMES)
        steps.append((kind, random_path(chance), random_path(chance), text))
    return steps


def seen(folder):
    """Describe a folder: kinds, permissions, contents and targets."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name, state = str(path.relative_to(folder)), path.lstat()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif stat.S_ISDIR(state.st_mode):
            found[name] = ("folder", stat.S_IMODE(state.st_mode))
        else:
            found[name] = ("file", stat.S_IMODE(state.st_mode), path.read_text())
    return found


SEEN = "import os, stat\nfrom pathlib import Path\n" + __import__("inspect").getsource(seen)


async def run(world, steps):
    code = f"{APPLY}\nos.umask(0o022)\nos.chdir('/task')\napply({steps!r})"
    ran = await world.execute(["python3", "-c", code])
    assert ran.exit_code == 0, ran


async def look(world):
    ran = await world.execute(["python3", "-c", f"{SEEN}\nprint(repr(seen('/task')))"])
    assert ran.exit_code == 0, ran
    return eval(ran.stdout)


async def one_history(seed, folder):
    """Run programs in a growing tree of worlds; return how many there were."""
    chance = random.Random(seed)
    count = 0
    root = await World().start()
    await root.execute("mkdir /task")
    worlds = [(root, Path(folder, "0"))]
    worlds[0][1].mkdir()
    try:
        for number in range(1, 9):
            world, copy = chance.choice(worlds)
            steps = random_steps(chance)
            await run(world, steps)
            here = os.getcwd()
            os.chdir(copy)
            DONE["apply"](steps)
            os.chdir(here)
            count += 1
            what = chance.choice(("continue", "snapshot", "copy", "fork"))
            if what == "snapshot":
                await world.snapshot()
            elif what in ("copy", "fork") and len(worlds) < 4:
                (fork,) = await world.fork(1, keep_programs=what == "copy")
                worlds.append((fork, Path(folder, str(number))))
                shutil.copytree(copy, folder / str(number), symlinks=True)
            if what in ("snapshot", "fork"):
                separated(copy)
            for each, oracle in {(world, copy), worlds[-1]}:
                assert await look(each) == seen(oracle), (seed, number, what, steps)
        for each, oracle in worlds:  # none has changed another
            assert await look(each) == seen(oracle), seed
    finally:
        await asyncio.gather(*(world.stop() for world, _ in worlds))
    return count


def separated(folder):
    """Make each name a file of its own: in an overlay, the names of a file part when a layer above changes one."""
    for path in Path(folder).rglob("*"):
        if (path.is_symlink() or path.is_file()) and path.lstat().st_nlink > 1:
            copy = path.with_name("separated")
            shutil.copy2(path, copy, follow_symlinks=False)
            os.replace(copy, path)


@needs_worlds
@pytest.mark.timeout(max(300, PROGRAMS))
def test_random_programs_leave_the_files_that_an_oracle_leaves():
    async def all_of_them():
        done = seed = 0
        while done < PROGRAMS:
            with tempfile.TemporaryDirectory() as folder:
                done += await one_history(seed, Path(folder))
            seed += 1
        return done

    os.umask(0o022)
    assert asyncio.run(all_of_them()) >= PROGRAMS
