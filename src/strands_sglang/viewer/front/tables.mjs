// The overview, the credit audit and the drift: long tables of which only the rows in view are in the document.

import { count, h, number } from "./dom.mjs";
import { visible } from "./text.mjs";
import { VirtualList } from "./virtual.mjs";

/** A table of `rows`, each made by `cells(row)`: a list of [class, content]. */
export class Table {
  constructor(label, height, cells) {
    this.rows = [];
    this.viewport = h("div.viewport.rows", { tabindex: "0", role: "table", "aria-label": label });
    this.list = new VirtualList(this.viewport, height, (at) => {
      const row = this.rows[at];
      return h(`div.line${row.kind ? `.${row.kind}` : ""}`, { role: "row" }, cells(row).map(([name, ...content]) => h(`div.cell${name}`, { role: "cell" }, ...content)));
    });
    this.list.spacer.setAttribute("role", "rowgroup");
  }

  head(names) {
    if (this.header) this.header.remove();
    this.header = h("div.line.head", { role: "row" }, names.map(([name, ...text]) => h(`div.cell${name}`, { role: "columnheader" }, ...text)));
    this.viewport.prepend(this.header);
  }

  show(rows) {
    this.rows = rows;
    this.viewport.scrollTop = 0;
    this.list.reset(rows.length);
  }
}

/** A name that may break after its marks. */
function breakable(name) {
  return name.split(/(?<=[:_-])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));
}

/** All findings and episodes. */
export class Overview {
  constructor({ index }) {
    const findings = h("div.viewport.findings", { tabindex: "0", role: "group", "aria-label": "Findings" });
    const list = new VirtualList(findings, 58, (i) => {
      const finding = index.findings[i];
      return h("a.finding", { href: `#finding-${i + 1}`, title: finding.why }, h("span.line1", {}, h("b", {}, finding.title), " ", h("span.where", {}, finding.where)), h("span.line2", {}, finding.why));
    });
    const table = new Table("Episodes", 34, (row) => {
      if (row.group !== undefined) {
        const group = index.groups[row.group];
        return [[".wide", "Group ", h("b", {}, group.name), ` · ${count(group.episodes.length)} episodes · `, group.episodes.length > 1 ? h("a", { href: `#siblings-${row.group}` }, "side by side") : "no siblings", group.note ? ` · ${group.note}` : ""]];
      }
      const episode = index.episodes[row.episode];
      return [
        [".name", h("a", { href: `#episode-${row.episode}` }, episode.id)],
        [".number", h("span.reward", {}, number(episode.reward, 3))],
        [".number", number(episode.advantage, 3)],
        ["", episode.outcome ?? "–"],
        [".number", count(episode.turns)],
        [".number", count(episode.tokens)],
        [".number", count(episode.trained)],
        [".number", episode.seconds === null ? "–" : `${episode.seconds.toFixed(1)} s`],
        ["", episode.found ? h("span.alarm", {}, `⚑ ${count(episode.found)}`) : "", episode.note ? ` ${episode.note}` : ""],
      ];
    });
    table.head([[".name", "Episode"], [".number", "Reward"], [".number", "Advantage"], ["", "Outcome"], [".number", "Turns"], [".number", "Tokens"], [".number", "Trained"], [".number", "Time"], ["", "Notes"]]);
    const many = index.findings.length;
    this.element = h(
      "section.overview",
      { "aria-label": "Overview" },
      ...index.notes.map((note) => h("p.note", {}, note)),
      index.examined && h("h2", {}, many ? `${count(many)} ${many === 1 ? "finding" : "findings"}` : "No findings"),
      index.examined && (many ? findings : h("p.empty", {}, "The doctor found nothing wrong in these files.")),
      h("h2", {}, `${count(index.episodes.length)} ${index.episodes.length === 1 ? "episode" : "episodes"}`),
      table.viewport,
    );
    this.element.classList.toggle("clean", !many);
    findings.style.height = `${many * 58 + 2}px`;
    this.open = () => {
      list.reset(many);
      table.show(index.groups.flatMap((group, i) => [{ group: i, kind: "group" }, ...group.episodes.map((episode) => ({ episode }))]));
    };
  }
}

const MEASURES = {
  receives: ["what it receives: |advantage × weight|", (abs, weight) => abs * weight],
  reduced: ["what its loss makes of that", (abs, weight, reduction) => abs * weight * reduction],
  alone: ["what its loss would make of advantages without weights", (abs, weight, reduction) => abs * reduction],
};

/** What each episode, sequence and turn contributes to the update, and what each trainer receives of it. */
export class Credit {
  constructor({ index }) {
    const audits = index.credit;
    const own = (event) => event.target.value;
    this.group = h("select", { "aria-label": "Batch", onchange: (event) => this.open(Number(own(event))) }, audits.map((audit, i) => h("option", { value: i }, audit.name)));
    this.measure = h("select", { "aria-label": "Show", onchange: () => this.draw() }, Object.entries(MEASURES).map(([key, [label]]) => h("option", { value: key }, label)));
    this.normalizer = h("select", { "aria-label": "Normalizer", onchange: () => this.draw() });
    this.caption = h("p.caption");
    this.table = new Table("Credit audit", 34, (row) => this.cells(row));
    this.audits = audits;
    this.element = h(
      "section.credit",
      { "aria-label": "Credit audit" },
      ...(audits.length
        ? [h("div.bar", {}, this.group, h("label", {}, "normalizer ", this.normalizer), h("label", {}, "show ", this.measure)), this.caption, this.table.viewport]
        : [h("p.empty", {}, "No credit to audit: these files hold neither rewards of sibling episodes nor rows with advantages.")]),
    );
  }

  open(at = this.at ?? 0) {
    if (!this.audits.length) return;
    this.at = Math.min(at, this.audits.length - 1);
    this.group.value = String(this.at);
    const audit = this.audits[this.at];
    this.normalizer.replaceChildren(...Object.keys(audit.normalizers).map((name) => h("option", { value: name }, name)));
    this.caption.textContent = audit.caption;
    this.draw();
  }

  draw() {
    const audit = this.audits[this.at];
    this.losses = audit.normalizers[this.normalizer.value].losses;
    this.exact = audit.normalizers[this.normalizer.value].exact;
    this.table.head([
      [".name", "Episode, sequence, turn"],
      [".number", "Tokens"],
      [".number", "Σ|A|"],
      ...(audit.recorded ? [[".number", "Σ|A·w| in the file"]] : []),
      [".number", "exact Σ|A·w|"],
      ...this.losses.map((loss) => [".number.trainer", ...loss.names.map((name) => h("span.loss", {}, breakable(name)))]),
    ]);
    const rows = [];
    for (const episode of audit.episodes) {
      rows.push({ kind: "group", label: episode.name, note: episode.note, link: `#episode-${episode.episode}`, parts: episode.rows });
      for (const row of episode.rows) {
        rows.push({ kind: "sequence", label: `sequence ${row.sequence}`, link: `#episode-${episode.episode}-sequence-${row.sequence}`, parts: [row] });
        for (const turn of row.turns) {
          rows.push({ kind: "leaf", label: `turn ${turn.number}`, link: `#episode-${episode.episode}-sequence-${row.sequence}-turn-${turn.turn}`, parts: [{ ...turn, row: row.row }] });
        }
      }
    }
    this.table.show(rows);
  }

  cells(row) {
    const audit = this.audits[this.at];
    const sum = (value) => row.parts.reduce((total, part) => total + value(part), 0);
    const [, measure] = MEASURES[this.measure.value];
    if (row.note) return [[".name", h("a", { href: row.link }, row.label)], [".wide", row.note]];
    const exact = sum((part) => part.abs * this.exact[part.row]);
    return [
      [".name", h("a", { href: row.link }, row.label)],
      [".number", count(sum((part) => part.tokens))],
      [".number", number(sum((part) => part.abs))],
      ...(audit.recorded ? [[".number", number(sum((part) => part.recorded ?? NaN))]] : []),
      [".number.exact", number(exact)],
      ...this.losses.map((loss) => {
        const value = sum((part) => measure(part.abs, loss.weights[part.row], loss.reductions[part.row]));
        const off = this.measure.value !== "receives" && Math.abs(value - exact) > 1e-6 * Math.max(exact, 1e-12);
        return [`.number.trainer${off ? ".off" : ""}`, number(value)];
      }),
    ];
  }
}

/** Where encoding the text again gives other tokens. */
export class Drift {
  constructor({ index }) {
    const { drift } = index;
    const side = (tokens) => tokens.map(([id, text]) => h("span.token", {}, h("span.t", {}, visible(text)), h("span.id", {}, String(id))));
    const table = new Table("Drift", 62, (row) => [
      [".name", h("a", { href: `#episode-${row.episode}-sequence-${row.sequence}-token-${row.position}` }, `${index.episodes[row.episode].id}, token ${count(row.position)}`)],
      ["", row.cause],
      [".side", ...side(row.recorded)],
      [".side", ...side(row.again)],
    ]);
    table.head([[".name", "Where"], ["", "Cause"], [".side", "Sampled or sent"], [".side", "Encoded again"]]);
    const summary = drift && `${count(drift.rows.length)} ${drift.rows.length === 1 ? "stretch differs" : "stretches differ"}; ${count(drift.tokens)} of ${count(drift.all)} tokens (${((100 * drift.tokens) / Math.max(1, drift.all)).toFixed(3)} %) in ${count(drift.sequences)} ${drift.sequences === 1 ? "sequence" : "sequences"}. ${drift.cut ? `The first ${count(drift.rows.length)} are listed.` : ""}`;
    this.element = h(
      "section.drift",
      { "aria-label": "Drift" },
      ...(drift
        ? [h("p.caption", {}, summary), drift.rows.length ? table.viewport : h("p.empty", {}, "Encoding the text again gives the very same tokens.")]
        : [h("p.empty", {}, "Drift is measured with the model's tokenizer: view with --tokenizer.")]),
    );
    this.open = () => drift && table.show(drift.rows);
  }
}
