// The logic of the page's modules, by node's own test runner: `node --test tests/unit/viewer`.

import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";

const FRONT = "../../../src/strands_sglang/viewer/front/";
const load = (name) => import(`${FRONT}${name}.mjs`);

const { parseAddress } = await load("app");
const { facts, fate } = await load("biography");
const { PROPERTIES, shade, signed } = await load("colors");
const { Store, unshuffle } = await load("data");
const { number } = await load("dom");
const { sequenceOf, stepAt } = await load("episode");
const { firstDifference, layOut, rowOf } = await load("layout");
const { filtered, sorted } = await load("tables");
const { find, findAll, parseQuery } = await load("search");
const { align } = await load("siblings");
const { Vocabulary, columns, harmless, visible } = await load("text");
const { difference, marks, states, treeRows } = await load("tree");

const random = (seed) => () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;

test("white space is visible, and long runs are counted", () => {
  assert.equal(visible(" a\n\t\r"), "·a↵⇥␍");
  assert.equal(visible(" ".repeat(24) + "x"), "·×24x");
});

test("control characters and bidirectional marks are named", () => {
  assert.equal(visible("\u001b[2J\u0000"), "␛[2J␀");
  assert.equal(visible("\u202eabc\u2066"), "⟨U+202E⟩abc⟨U+2066⟩");
  for (let code = 0; code < 0x11000; code++) {
    const character = String.fromCodePoint(code);
    for (const shown of [visible(character), harmless(character)]) {
      assert.ok(!/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/.test(shown), code.toString(16));
    }
  }
});

test("wide and combining characters take the columns that they have", () => {
  assert.equal(columns("abc"), 3);
  assert.equal(columns("日本"), 4);
  assert.equal(columns("e\u0301"), 1);
});

test("bytes of one character are shown as bytes and found together", () => {
  const vocabulary = new Vocabulary([7, 8, 9], [[0xf0, 0x9f], [0x98, 0x80], "!"]);
  assert.equal(vocabulary.entry(0).shown, "⟨F0 9F⟩");
  const sequence = { tokens: [2, 0, 1, 2], places: [0, 1, 2, 3], vocabulary };
  assert.deepEqual(find(sequence, {}, { text: "😀!" }), { hits: Uint8Array.of(0, 1, 1, 1), starts: [1] });
  assert.equal(new Vocabulary([5], [null]).entry(0).shown, "⟨5⟩");
  assert.deepEqual([visible("a\udcd3"), harmless("a\udcd3")], ["a⟨D3⟩", "a⟨D3⟩"]);
});

test("rows hold each token once, in order, within the limits", () => {
  const next = random(3);
  for (let round = 0; round < 200; round++) {
    const count = Math.floor(next() * 200);
    const sizes = Array.from({ length: count }, () => ({ width: Math.floor(next() * 12), ends: next() < 0.1 }));
    const at = [...new Set(Array.from({ length: 5 }, () => Math.floor(next() * (count + 1))))].sort((a, b) => a - b);
    const rows = layOut(count, (i) => sizes[i], 20, at.map((where) => ({ at: where })), 6);
    let position = 0;
    const heads = [];
    for (const { start, stop, heading } of rows) {
      assert.equal(start, position);
      if (heading) heads.push(start);
      else {
        assert.ok(stop > position && stop - position <= 6);
        position = stop;
        for (let i = start; i < position - 1; i++) assert.ok(!sizes[i].ends);
      }
    }
    assert.equal(position, count);
    assert.deepEqual(heads, at);
    for (let i = 0; i < count; i++) {
      const { start, stop } = rows[rowOf(rows, i)];
      assert.ok(start <= i && i < stop);
    }
  }
});

test("siblings are aligned at their first difference", () => {
  const lanes = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 2, 3, 4, 7]].map((tokens) => ({ tokens }));
  assert.equal(firstDifference(lanes.map((lane) => lane.tokens)), 3);
  const aligned = align(lanes, () => ({ width: 1, ends: false }), 2, 10);
  assert.deepEqual(lanes.map((_, lane) => aligned.range(lane, aligned.first)[0]), [3, 3, 3]);
  for (const lane of lanes.keys()) {
    const seen = [];
    for (let row = 0; row < aligned.count; row++) {
      const range = aligned.range(lane, row);
      for (let i = range?.[0]; range && i < range[1]; i++) seen.push(lanes[lane].tokens[i]);
    }
    assert.deepEqual(seen, lanes[lane].tokens);
  }
  assert.equal(firstDifference([[1, 2], [1, 2, 3]]), 2);
});

test("packed arrays are read back", async () => {
  const values = Float32Array.of(0, -1.5, Math.PI, NaN);
  const bytes = new Uint8Array(values.buffer);
  const planes = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) planes[(i % 4) * 4 + (i >> 2)] = bytes[i];
  assert.deepEqual(unshuffle(planes, "f4"), values);
  const block = (content) => deflateSync(content).toString("base64");
  let reads = 0;
  const blocks = { a: block(planes), b: block(JSON.stringify({ é: 1 })) };
  const store = new Store((at) => (reads++, blocks[at]));
  assert.deepEqual(await store.get({ at: "a", type: "f4" }), values);
  assert.deepEqual(await store.get({ at: "b", type: "json" }), { é: 1 });
  await store.get({ at: "a", type: "f4" });
  assert.equal(reads, 2);
});

const page = { writers: ["prompt", "model"], versions: ["11", "12"], whys: ["the model did not sample it", "its loss mask is 0"], ranges: { advantage: 2, gap: 0.1 } };
const body = {
  turns: [
    { number: 4, prompt: [0, 2], sampled: [2, 5], parent: null, branching: "opens", status: "committed", reason: "opens the first sequence" },
    { number: 6, prompt: [5, 6], sampled: [6, 8], parent: 0, branching: "forks", status: "final", reason: "forks after turn 4" },
  ],
  columns: {
    token: Uint16Array.of(0, 1, 2, 3, 2, 1, 2, 3),
    sampled: Uint8Array.of(0, 0, 1, 1, 1, 0, 1, 1),
    writer: Uint8Array.of(0, 0, 1, 1, 1, 0, 1, 1),
    trains: Uint8Array.of(0, 0, 1, 1, 0, 0, 2, 2),
    mask: Uint8Array.of(0, 0, 1, 1, 0, 0, 1, 1),
    why: Uint8Array.of(0, 0, 1, 1, 1, 0, 1, 1),
    logprob: Float32Array.of(NaN, NaN, -0.5, -6, -1, NaN, -2, -0.1),
    version: Uint8Array.of(0, 0, 1, 1, 2, 0, 2, 2),
    turn: Uint8Array.of(4, 4, 4, 4, 4, 6, 6, 6),
  },
};
const vocabulary = new Vocabulary([10, 20, 30, 40], ["App", "le ", "wor", "ld"]);

test("a sequence is a path through the store", () => {
  const { tokens, places, bounds } = sequenceOf(body, [[0, 2], [1, 2]]);
  assert.deepEqual([...places], [0, 1, 2, 3, 5, 6, 7]);
  assert.deepEqual([...tokens], [0, 1, 2, 3, 1, 2, 3]);
  assert.equal(stepAt(bounds, 3).turn, 0);
  assert.equal(stepAt(bounds, 4).turn, 1);
});

test("text is found across tokens, and tokens by id and property", () => {
  const sequence = { ...sequenceOf(body, [[0, 2], [1, 2]]), vocabulary };
  const search = (query) => find(sequence, body.columns, parseQuery(query, { ids: vocabulary.ids, ...page }));
  assert.deepEqual(search("APPLE WORLD").starts, [0]);
  assert.deepEqual([...search("le w").hits], [0, 1, 1, 0, 1, 1, 0]);
  assert.deepEqual(search("id:40").starts, [3, 6]);
  assert.deepEqual(search("logprob < -5").starts, [3]);
  assert.deepEqual(search("probability>0.5").starts, [2, 6]);
  assert.deepEqual(search("writer:model").starts, [2, 5]);
  assert.deepEqual(search("version:12").starts, [5]);
  assert.deepEqual(search("turn:6").starts, [4]);
  assert.deepEqual(search("trained").starts, [2, 5]);
  assert.deepEqual(search("nothing of that").starts, []);
  assert.deepEqual(search("").starts, []);
});

test("an episode is searched in all its sequences, and what they share counts once", () => {
  const flows = [[[0, 2], [1, 2]], [[0, 3]]].map((steps) => ({ ...sequenceOf(body, steps), vocabulary }));
  const all = (query) => findAll(flows, { ...body, length: 8 }, parseQuery(query, { ids: vocabulary.ids, ...page }));
  assert.deepEqual(all("trained"), [{ sequence: 0, position: 2, many: 4 }]);
  assert.deepEqual(all("apple"), [{ sequence: 0, position: 0, many: 1 }]);
  assert.deepEqual(all("id:30"), [{ sequence: 0, position: 2, many: 2 }, { sequence: 1, position: 4, many: 1 }]);
  assert.deepEqual(all("nothing of that"), []);
  const said = { said: [["user", "text", "An apple, an APPLE"], ["assistant", "text", "Apple"]], length: 0 };
  assert.deepEqual(findAll([], said, { text: "apple" }), [{ many: 3, text: "An apple, an APPLE" }]);
});

test("a query that names an unknown property is not only text", () => {
  const parse = (query) => parseQuery(query, { ids: vocabulary.ids, ...page });
  assert.equal(parse("reward:1").property, "reward");
  assert.equal(parse("version:99").property, "version");
  assert.equal(parse("a plain text").property, undefined);
});

test("a biography says whether a token is trained, and why not", () => {
  assert.equal(fate(page, body, 0, 2), "yes, in this sequence");
  assert.equal(fate(page, body, 1, 2), "in sequence 0, so not again here");
  assert.equal(fate(page, body, 0, 0), "no: the model did not sample it");
  assert.equal(fate(page, body, 0, 4), "no: its loss mask is 0");
  assert.match(fate(page, { columns: { ...body.columns, trains: body.columns.trains.with(0, 1) } }, 0, 0), /although the model did not sample it/);
  assert.match(fate(page, { columns: { ...body.columns, times: Uint8Array.of(0, 0, 2) } }, 0, 2), /in 2 sequences/);
  const life = Object.fromEntries(facts(page, body, { vocabulary, sequence: 1, position: 5, place: 6, turn: 1 }));
  assert.match(life["Token"], /^30 /);
  assert.equal(life["Turn"], "6 (forks, final): forks after turn 4");
  assert.equal(life["Weight version"], "12");
  assert.match(life["Logprob"], /^−2 .*0\.135/);
});

test("turns are a tree, agents apart, with forks indented", () => {
  const turn = (parent, agent) => ({ parent, agent });
  const rows = treeRows([turn(null, "a"), turn(0, "a"), turn(null, "b"), turn(0, "a"), turn(1, "a")]);
  assert.deepEqual(rows, [
    { agent: "a", name: "Agent a" },
    { turn: 0, depth: 0 },
    { turn: 1, depth: 1 },
    { turn: 4, depth: 1 },
    { turn: 3, depth: 1 },
    { agent: "b", name: "Agent b" },
    { turn: 2, depth: 0 },
  ]);
  assert.deepEqual(treeRows([]), []);
  const names = (...agents) => treeRows(agents.map((agent) => turn(null, agent))).flatMap(({ name }) => name ?? []);
  assert.deepEqual(names("7".repeat(32), null, "checker", "8".repeat(32)), ["Agent 1", "Outside an agent's loop", "Agent checker", "Agent 2"]);
  assert.deepEqual(names(null, null), []);
});

test("each word of a turn is explained", () => {
  const turn = { branching: "opens", status: "final", clamped: true, finish: "stop", resumed: true };
  assert.deepEqual(marks(turn), ["opens", "final", "resumed"]);
  assert.deepEqual(marks({ ...turn, finish: "length" }), ["opens", "final", "resumed", "context full"]);
  for (const status of ["asked", "answered", "committed", "final", "discarded", "cut", "failed"]) {
    const every = { branching: "forks", status, auxiliary: true, resumed: true, constrained: true, clamped: true, finish: "length", waits: true };
    assert.deepEqual(new Set(states([every]).map(([word]) => word.replace(/^\W /, ""))), new Set(marks(every)));
  }
});

test("what was sent is compared with what was recorded", () => {
  const said = (...texts) => texts.map((text) => [text.startsWith("a") ? "assistant" : "user", "text", text, ""]);
  const turns = [
    { number: 0, parent: null, reason: "opens the first sequence", said: said("q", "a1") },
    { number: 1, parent: 0, reason: "extends turn 0 with 1 new message", said: said("r", "a2") },
    { number: 2, parent: 0, reason: "forks after turn 0: message 2 (user) is not the recorded one (compared with turn 1)", said: said("s", "a3") },
    { number: 3, parent: null, reason: "opens a sequence: the tools changed (compared with turn 1)", said: said("q", "a1", "r", "a9") },
    { number: 4, parent: null, reason: "opens a sequence: it continues after message 3 (compared with turn 1)", said: said("q", "a1", "r", "a2", "t", "a4") },
  ];
  assert.deepEqual(turns.map((_, at) => difference(turns, at)), [
    null,
    null,
    { other: 1, recorded: said("r")[0], sent: said("s")[0] },
    null,
    { other: 1, recorded: undefined, sent: said("t")[0] },
  ]);
});

test("addresses lead to places", () => {
  assert.deepEqual(parseAddress("#finding-3"), { view: "finding", number: 3 });
  assert.deepEqual(parseAddress("#episode-2-sequence-1-token-17"), { view: "episode", number: 2, sequence: 1, token: 17 });
  assert.deepEqual(parseAddress("#<script>"), { view: "<script>" });
});

test("scales have an end on each side, and no value has no color", () => {
  const heat = (value, top) => shade("heat", value, top);
  assert.deepEqual([heat(0, 2), heat(2, 2), heat(99, 2), heat(NaN, 2), heat(1, 0)], ["heat s0", "heat s9", "heat s9", "", "heat s0"]);
  assert.deepEqual([signed(-2, 2), signed(0, 2), signed(5, 2), signed(NaN, 2)], ["down s9", "up s0", "up s9", ""]);
  assert.equal(PROPERTIES.logprob.classOf(body.columns, 0, page), "");
  assert.equal(number(NaN), "–");
  assert.equal(number(-0.00012), "−1.20e−4");
});

test("tasks are sorted by number or name, and unknown values come last", () => {
  const rows = [{ v: 2 }, { v: null }, { v: -1 }, { v: 2, second: true }];
  assert.deepEqual(sorted(rows, (row) => row.v, false), [{ v: -1 }, { v: 2 }, { v: 2, second: true }, { v: null }]);
  assert.deepEqual(sorted(rows, (row) => row.v, true), [{ v: 2 }, { v: 2, second: true }, { v: -1 }, { v: null }]);
  assert.deepEqual(sorted(["t10", "t9"], (name) => name, false), ["t9", "t10"]);
});

test("tasks are filtered by every word and by state", () => {
  const tasks = [
    { name: "a1", question: "What is 2 + 2?", state: "x" },
    { name: "a2", question: "Who is it?", state: "y" },
  ];
  const textOf = ({ name, question }) => `${name} ${question}`;
  assert.deepEqual(filtered(tasks, "IS a", textOf).map((task) => task.name), ["a1", "a2"]);
  assert.deepEqual(filtered(tasks, "a what", textOf).map((task) => task.name), ["a1"]);
});
