// Search over the tokens of a sequence: by text, id or property.

const NUMBER = String.raw`[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?`;
const COMPARISON = new RegExp(`^(id|logprob|probability|advantage|weight|gap|position)\\s*(<=|>=|<|>|=|:)\\s*(${NUMBER})$`, "i");
const NAMED = /^(writer|version|turn)\s*[:=]\s*(.+)$/i;
const FLAGS = {
  trained: (c, i) => c.mask?.[i] === 1,
  untrained: (c, i) => c.sampled?.[i] === 1 && !c.mask?.[i],
  sampled: (c, i) => c.sampled?.[i] === 1,
  drifted: (c, i) => c.drift?.[i] > 0,
};

/** What can be searched for, for people. */
export const HELP =
  "text, or: id:151645 · logprob<-5 · probability<0.1 · advantage>0 · gap>0.01 · writer:tool · version:3 · turn:4 · trained · untrained · sampled · drifted";

/**
 * Parse a query into a test of one token, or the text to find.
 *
 * @returns {{text: string}|{test: (c: object, place: number, position: number) => boolean}}
 */
export function parseQuery(query, { ids, writers, versions }) {
  const text = query.trim();
  const flag = FLAGS[text.toLowerCase()];
  if (flag) return { test: flag };
  let match = COMPARISON.exec(text);
  if (match) {
    const name = match[1].toLowerCase();
    const operator = match[2] === ":" ? "=" : match[2];
    const wanted = Number(match[3].replace("−", "-"));
    const compare = {
      "<": (value) => value < wanted,
      ">": (value) => value > wanted,
      "<=": (value) => value <= wanted,
      ">=": (value) => value >= wanted,
      "=": (value) => Math.abs(value - wanted) <= 1e-4 * Math.abs(wanted),
    }[operator];
    const exact = operator === "=" ? (value) => value === wanted : compare;
    const values = {
      id: (c, i) => exact(ids[c.token[i]]),
      position: (c, i, position) => exact(position),
      logprob: (c, i) => compare(c.logprob?.[i]),
      probability: (c, i) => compare(Math.exp(c.logprob?.[i])),
      advantage: (c, i) => compare(c.advantage?.[i]),
      weight: (c, i) => compare(c.weight?.[i]),
      gap: (c, i) => compare(c.trainer_logprob?.[i] - c.logprob?.[i]),
    };
    return { test: values[name] };
  }
  match = NAMED.exec(text);
  if (match) {
    const [, name, wanted] = match;
    const value = wanted.trim();
    if (name.toLowerCase() === "writer") {
      const code = writers.indexOf(value.toLowerCase());
      if (code >= 0) return { test: (c, i) => c.writer?.[i] === code };
    } else if (name.toLowerCase() === "version") {
      const code = versions.indexOf(value) + 1;
      if (code > 0) return { test: (c, i) => c.version?.[i] === code };
    } else {
      return { test: (c, i) => c.turn?.[i] === Number(value) };
    }
  }
  return { text: query };
}

/**
 * Find what matches in a sequence.
 *
 * @param {{tokens: ArrayLike<number>, places: Int32Array, vocabulary: Vocabulary}} sequence
 * @returns {{hits: Uint8Array, starts: number[]}} a mark per token, and where each match begins
 */
export function find(sequence, columns, query) {
  const { tokens, places, vocabulary } = sequence;
  const hits = new Uint8Array(tokens.length);
  const starts = [];
  if (query.test) {
    for (let i = 0; i < tokens.length; i++) {
      if (!query.test(columns, places[i], i)) continue;
      hits[i] = 1;
      if (!i || !hits[i - 1]) starts.push(i);
    }
    return { hits, starts };
  }
  const wanted = query.text.toLowerCase();
  if (!wanted) return { hits, starts };
  const lowered = new Map();
  const pieces = new Array(tokens.length);
  const offsets = new Uint32Array(tokens.length + 1);
  for (let i = 0; i < tokens.length; i++) {
    let piece = lowered.get(tokens[i]);
    if (piece === undefined) lowered.set(tokens[i], (piece = vocabulary.plain(tokens[i]).toLowerCase()));
    pieces[i] = piece;
    offsets[i + 1] = offsets[i] + piece.length;
  }
  const all = pieces.join("");
  let token = 0;
  for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + wanted.length)) {
    while (offsets[token + 1] <= at) token++;
    starts.push(token);
    for (let i = token; i < tokens.length && offsets[i] < at + wanted.length; i++) hits[i] = 1;
  }
  return { hits, starts };
}
