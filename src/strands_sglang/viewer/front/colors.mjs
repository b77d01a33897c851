// What the color of a token can mean: a class of the style sheet for each token, and a legend.

import { h, number, options } from "./dom.mjs";

/** The classes of a value on a scale from 0 to `top`; none if there is no value. */
export function shade(name, value, top) {
  if (Number.isNaN(value)) return "";
  const share = top > 0 ? Math.min(1, Math.max(0, value / top)) : 0;
  return `${name} s${Math.round(share * 9)}`;
}

/** The classes of a value on a scale from `-top` to `top`. */
export function signed(value, top) {
  return shade(value < 0 ? "down" : "up", Math.abs(value), top);
}

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
    needs: ["trains"],
    classOf: (c, i) => (c.trains[i] ? "trained" : c.sampled[i] ? "untrained" : "given"),
    legend: () => [
      ["trained", "trained: loss mask 1"],
      ["untrained", "sampled, not trained"],
      ["given", "not sampled"],
    ],
  },
  logprob: {
    label: "Logprob",
    needs: ["logprob"],
    classOf: (c, i) => shade("heat", -c.logprob[i], 8),
    legend: () => heat("0", "−8 and less"),
  },
  probability: {
    label: "Probability",
    needs: ["logprob"],
    classOf: (c, i) => shade("heat", 1 - Math.exp(c.logprob[i]), 1),
    legend: () => heat("1", "0"),
  },
  advantage: {
    label: "Advantage",
    needs: ["advantage"],
    classOf: (c, i, page) => (c.trains && !c.trains[i] ? "" : signed(c.advantage[i], page.ranges.advantage)),
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

function heat(low, high) {
  return [["", low], ...[0, 2, 4, 6, 8, 9].map((at) => [shade("heat", at, 9), ""]), ["", high]];
}

function diverging(top) {
  const steps = [-9, -6, -3, 0, 3, 6, 9].map((at) => [signed(at, 9), ""]);
  return [["", number(-top, 3)], ...steps, ["", number(top, 3)]];
}

/** The properties for which an episode has what they need. */
export function available(columns) {
  return Object.keys(PROPERTIES).filter((key) => PROPERTIES[key].needs.every((name) => columns[name]));
}

/** Offer the colors that any of some episodes has, and return the chosen one. */
export function colorOptions(select, columns) {
  const known = Object.keys(PROPERTIES).filter((key) => columns.some((own) => available(own).includes(key)));
  const chosen = known.includes(select.value) ? select.value : known[0];
  select.replaceChildren(...options(known.map((key) => [key, PROPERTIES[key].label]), chosen));
  return chosen;
}

/** The legend as an element. */
export function legend(key, page, columns) {
  const entries = PROPERTIES[key].legend(page, columns);
  const labels = entries.map(([, label]) => label).filter(Boolean);
  return h(
    "span.legend",
    { role: "img", "aria-label": `Legend: ${labels.join(", ")}` },
    entries.map(([name, label]) => h("span.entry", {}, name && h(`span.swatch.${name.replace(" ", ".")}`), label)),
  );
}
