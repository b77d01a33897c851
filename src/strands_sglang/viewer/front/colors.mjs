// What the color of a token can mean: a class of the style sheet for each token, and a legend.

import { h, number } from "./dom.mjs";

export const STEPS = 9; // of a scale, as in style.css

/** Step of a value on a scale from 0 to `top`; -1 if there is no value. */
export function step(value, top) {
  if (Number.isNaN(value)) return -1;
  if (!(top > 0)) return 0;
  return Math.round(Math.min(1, Math.max(0, value / top)) * STEPS);
}

/** Step of a signed value: -STEPS to STEPS; null if there is no value. */
export function signedStep(value, top) {
  if (Number.isNaN(value)) return null;
  const size = step(Math.abs(value), top);
  return value < 0 ? -size : size;
}

const signed = (value, top) => {
  const at = signedStep(value, top);
  return at === null ? "" : at < 0 ? `down${-at}` : `up${at}`;
};
const heat = (value, top) => {
  const at = step(value, top);
  return at < 0 ? "" : `heat${at}`;
};

const MASKS = [
  ["trained", "trained: loss mask 1"],
  ["untrained", "sampled, not trained"],
  ["given", "not sampled"],
];

/**
 * The properties that tokens can be colored by.
 *
 * `needs` names the columns; `classOf(c, i)` returns the class of token i; `legend` returns pairs of class and label.
 */
export const PROPERTIES = {
  writer: {
    label: "Writer",
    needs: ["writer"],
    classOf: (c, i, page) => `writer-${page.writers[c.writer[i]]}`,
    legend: (page, c) => page.writers.flatMap((name, i) => (c.writer.includes(i) ? [[`writer-${name}`, name]] : [])),
  },
  mask: {
    label: "Loss mask",
    needs: ["mask"],
    classOf: (c, i) => (c.mask[i] ? "trained" : c.sampled[i] ? "untrained" : "given"),
    legend: () => MASKS,
  },
  logprob: {
    label: "Logprob",
    needs: ["logprob"],
    classOf: (c, i) => heat(-c.logprob[i], 8),
    legend: () => scale("heat", "0", "−8 and less"),
  },
  probability: {
    label: "Probability",
    needs: ["logprob"],
    classOf: (c, i) => heat(1 - Math.exp(c.logprob[i]), 1),
    legend: () => scale("heat", "1", "0"),
  },
  advantage: {
    label: "Advantage",
    needs: ["advantage"],
    classOf: (c, i, page) => (c.mask && !c.mask[i] ? "" : signed(c.advantage[i], page.ranges.advantage)),
    legend: (page) => diverging(page.ranges.advantage),
  },
  version: {
    label: "Weight version",
    needs: ["version"],
    classOf: (c, i) => (c.version[i] ? `kind${(c.version[i] - 1) % 8}` : ""),
    legend: (page) => page.versions.slice(0, 16).map((name, i) => [`kind${i % 8}`, name]),
  },
  gap: {
    label: "Sampler–trainer gap",
    needs: ["logprob", "trainer_logprob"],
    classOf: (c, i, page) => signed(c.trainer_logprob[i] - c.logprob[i], page.ranges.gap),
    legend: (page) => diverging(page.ranges.gap),
  },
  drift: {
    label: "Drift",
    needs: ["drift"],
    classOf: (c, i) => (c.drift[i] ? "wrong" : ""),
    legend: () => [["wrong", "encoded differently again"]],
  },
};

function scale(name, low, high) {
  const steps = [0, 2, 4, 6, 8, 9].map((at) => [`${name}${at}`, ""]);
  return [["", low], ...steps, ["", high]];
}

function diverging(top) {
  const steps = [-9, -6, -3, 0, 3, 6, 9].map((at) => [at < 0 ? `down${-at}` : `up${at}`, ""]);
  return [["", number(-top, 3)], ...steps, ["", number(top, 3)]];
}

/** The properties for which an episode has what they need. */
export function available(columns) {
  return Object.keys(PROPERTIES).filter((key) => PROPERTIES[key].needs.every((name) => columns[name]));
}

/** The legend as an element. */
export function legend(key, page, columns) {
  const entries = PROPERTIES[key].legend(page, columns);
  return h(
    "span.legend",
    { role: "img", "aria-label": `Legend: ${entries.map(([, label]) => label).filter(Boolean).join(", ")}` },
    entries.map(([name, label]) =>
      name && label
        ? h("span.entry", {}, h(`span.swatch.${name}`, {}), label)
        : name
          ? h(`span.swatch.step.${name}`, {})
          : h("span.end", {}, label),
    ),
  );
}
