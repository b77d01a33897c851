"""What tests ask a real SGLang server, do to it, and read in its log, beside the library."""

import asyncio
import json

import httpx


async def running_requests(base_url):
    """Requests that the server is generating for, or is going to."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
        loads = (await http.get("/v1/loads")).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def until_it_runs(base_url):
    """Until the server is generating."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
        while not (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.01)  # polling the server's own word, with pytest's timeout as the limit


async def at_best(seconds, *, goal):
    """The best of up to three tries: a machine that is busy can be late, a library that does nothing always is."""
    best = await seconds()
    for _ in range(2):
        if best >= goal:
            best = min(best, await seconds())
    return best


async def abort_all(base_url):
    """End all generations, as a trainer does before it updates the weights."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
        (await http.post("/abort_request", json={"abort_all": True})).raise_for_status()


# Arguments with which a server logs every request and its whole answer.
LOG_EVERYTHING = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")


def logged(path, event):
    """The log's entries of one kind, `request.received` or `request.finished`."""
    entries = []
    for line in path.read_text(errors="replace").splitlines():
        start = line.find('{"')
        if f'"{event}"' in line and start >= 0:
            entries.append(json.loads(line[start:]))
    return entries
