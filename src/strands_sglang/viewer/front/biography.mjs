// Everything that is known of one token.

import { count, number } from "./dom.mjs";
import { marks } from "./tree.mjs";

const WRITERS = {
  prompt: "a part of the prompt",
  template: "the chat template",
  system: "the system prompt",
  user: "the user",
  tool: "a tool",
  model: "the model: sampled",
  history: "an earlier answer, given as prompt",
};

/** The biography of the token at a position of a sequence, and a place of the columns, as pairs of name and text. */
export function facts(page, episode, { vocabulary, sequence, position, place, turn: at }) {
  const c = episode.columns;
  const turn = episode.turns[at];
  const entry = c.token[place];
  const value = (name) => c[name]?.[place] ?? NaN;
  const logprob = value("logprob");
  const pairs = [];
  const add = (name, text) => pairs.push([name, text]);
  add("Token", `${vocabulary.ids[entry]}  ${vocabulary.entry(entry).shown}`);
  add("Trained", fate(page, episode, sequence, place));
  add("Position", position === place ? count(position) : `${count(position)} (${count(place)} in the episode)`);
  add("Written by", WRITERS[page.writers[c.writer[place]]]);
  add("Turn", `${turn.number} (${marks(turn).join(", ")}): ${turn.reason}`);
  if (c.version) add("Weight version", c.version[place] ? page.versions[c.version[place] - 1] : "–");
  const measured = {
    Logprob: [logprob, `  (probability ${number(Math.exp(logprob), 3)})`],
    "Training logprob": [value("trainer_logprob"), `  (gap ${number(value("trainer_logprob") - logprob, 3)})`],
    "Could be sampled from": [value("kept"), " ids"],
    Advantage: [value("advantage"), ""],
    Weight: [value("weight"), `  (product ${number(value("weight") * value("advantage"), 3)})`],
  };
  for (const [name, [known, more]] of Object.entries(measured)) if (!Number.isNaN(known)) add(name, number(known) + more);
  if (c.drift) add("Drift", c.drift[place] ? "encoding the text again gives other ids here" : "none");
  return pairs;
}

/** Whether a token is trained, and if not, why not. */
export function fate(page, episode, sequence, place) {
  const c = episode.columns;
  const trains = c.trains?.[place];
  const times = c.times?.[place];
  if (times > 1) return `in ${times} sequences: a token should train once`;
  if (trains && !c.sampled[place]) return "yes, although the model did not sample it";
  if (trains === sequence + 1) return "yes, in this sequence";
  if (trains) return `in sequence ${trains - 1}, so not again here`;
  return `no: ${page.whys[c.why[place]]}`;
}
