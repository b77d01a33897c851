// The overview, the credit audit and the drift: long tables of which only the rows in view are in the document.

import { count, counted, h, number } from "./dom.mjs";
import { outcomeChip, rewardChip } from "./score.mjs";
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

/** Sort values; unknown ones come last in either direction, and equal ones keep their order. */
export function sorted(rows, valueOf, descending) {
  const known = (value) => value !== null && value !== undefined;
  return rows
    .map((row, at) => ({ row, at, value: valueOf(row) }))
    .sort((a, b) => {
      if (!known(a.value) || !known(b.value)) return known(b.value) - known(a.value) || a.at - b.at;
      const order = typeof a.value === "string" ? a.value.localeCompare(b.value, "en", { numeric: true }) : a.value - b.value;
      return (descending ? -order : order) || a.at - b.at;
    })
    .map(({ row }) => row);
}

/** The rows whose text has all words of another. */
export function filtered(rows, text, textOf) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) => {
    const own = textOf(row).toLowerCase();
    return words.every((word) => own.includes(word));
  });
}

/**
 * A table that its heads sort.
 *
 * Columns are `{name, kind, width: [px, share], value(row), cell(row)}`. Rows with `wide` are headings, which a sorted
 * table does not have.
 */
export class SortedTable extends Table {
  constructor(label, columns) {
    super(label, 34, (row) => (row.wide ? [[".wide", ...row.wide]] : columns.map(({ kind, cell }) => [kind ?? "", cell(row)].flat())));
    this.columns = columns;
    this.sort = { column: null, descending: false };
    const { style } = this.viewport;
    style.setProperty("--columns", columns.map(({ width: [least, share] }) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`)).join(" "));
    style.setProperty("--least", `${columns.reduce((sum, { width }) => sum + width[0] + 12, 10)}px`);
    this.viewport.classList.add("sorted");
  }

  /** Show rows in the order that was chosen, else as they come. */
  fill(rows) {
    this.given = rows;
    const { column, descending } = this.sort;
    this.head(
      this.columns.map(({ name, kind }, i) => {
        const sign = column === i ? (descending ? " ▼" : " ▲") : "";
        return [kind ?? "", h("button", { onclick: () => this.sortBy(i) }, name + sign)];
      }),
    );
    if (column === null) return this.show(rows);
    this.header.children[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    this.show(sorted(rows.filter((row) => !row.wide), this.columns[column].value, descending));
  }

  sortBy(column) {
    this.sort = { column, descending: this.sort.column === column && !this.sort.descending };
    this.fill(this.given);
    this.header.children[column].firstChild.focus();
  }
}

/** The mean reward of each training step as bars; one of them shows its episodes. */
function steps({ steps }, choose) {
  const rewards = steps.map(({ reward }) => reward);
  const [low, high] = [Math.min(0, ...rewards), Math.max(0, ...rewards)];
  const span = high - low || 1;
  const bars = steps.map(({ name, reward, rewards: many }) => {
    const bar = h("span.mark");
    bar.style.bottom = `${(100 * (Math.min(0, reward) - low)) / span}%`;
    bar.style.height = `${(100 * Math.abs(reward)) / span}%`;
    const told = `${name}: mean reward ${number(reward, 3)} of ${counted(many, "episode")}`;
    return h("button", { type: "button", title: told, "aria-label": told, onclick: () => choose(name) }, bar);
  });
  const range = `${steps[0].name} to ${steps[steps.length - 1].name}, ${number(low, 3)} to ${number(high, 3)}`;
  return h("div.steps", {}, h("p.caption", {}, `Mean reward by step: ${range}`), h("div.bars", { role: "group", "aria-label": "Mean reward by step" }, bars));
}

/** All findings and episodes. */
export class Overview {
  constructor({ index }) {
    const findings = h("div.viewport.findings", { tabindex: "0", role: "group", "aria-label": "Findings" });
    const list = new VirtualList(findings, 58, (i) => {
      const finding = index.findings[i];
      return h("a.finding", { href: `#finding-${i + 1}`, title: finding.why }, h("span.line1", {}, h("b", {}, finding.title), " ", h("span.where", {}, finding.where)), h("span.line2", {}, finding.why));
    });
    const { episodes, groups } = index;
    const of = (name) => (at) => episodes[at][name];
    const figure = (name, label, width, digits) => ({ name: label, kind: ".number", width: [width, 0], value: of(name), cell: (at) => number(episodes[at][name], digits) });
    const total = (name, label) => ({ ...figure(name, label, 60), cell: (at) => (episodes[at][name] === null ? "–" : count(episodes[at][name])) });
    const words = (name, label, width, share) => ({ name: label, width: [width, share], value: of(name), cell: (at) => h("span", { title: episodes[at][name] }, episodes[at][name]) });
    const columns = [
      { ...words("id", "Episode", 110, 1), kind: ".name", cell: (at) => h("a", { href: `#episode-${at}`, title: episodes[at].key }, episodes[at].id) },
      words("question", "Question", 170, 2),
      words("answer", "Answer", 150, 2),
      { ...figure("reward", "Reward", 64), cell: (at) => rewardChip(episodes[at].reward, index.report?.success_threshold) },
      { ...words("outcome", "Outcome", 160, 0), cell: (at) => outcomeChip(episodes[at].outcome) },
      figure("advantage", "Advantage", 76, 3),
      total("turns", "Turns"),
      total("tokens", "Tokens"),
      total("trained", "Trained"),
      figure("gap", "Max gap", 76, 3),
      { ...figure("seconds", "Time", 64), cell: (at) => (episodes[at].seconds === null ? "–" : `${episodes[at].seconds.toFixed(1)} s`) },
      { ...words("note", "Notes", 140, 1), value: (at) => -episodes[at].found || episodes[at].note || null, cell: (at) => [episodes[at].found ? h("span.alarm", {}, `⚑ ${count(episodes[at].found)} `) : "", h("span", { title: episodes[at].note }, episodes[at].note)] },
    ];
    const known = (value) => value !== null && value !== "";
    const table = new SortedTable("Episodes", columns.filter(({ value }) => episodes.some((_, at) => known(value(at)))));
    const filter = h("input", { type: "search", placeholder: "Filter the episodes", "aria-label": "Filter the episodes", spellcheck: "false", oninput: () => draw() });
    const shown = h("span.caption", { role: "status" });
    const many = index.findings.length;
    const textOf = (at) => {
      const { id, question, answer, outcome, note, group } = episodes[at];
      return [id, question, answer, outcome?.replaceAll("_", " "), note, groups[group].name].join(" ");
    };
    const draw = () => {
      let matching = 0;
      const rows = groups.flatMap((group, i) => {
        const own = filtered(group.episodes, filter.value, textOf);
        matching += own.length;
        const wide = ["Group ", h("b", {}, group.name), ` · ${counted(group.episodes.length, "episode")}`];
        if (group.episodes.filter((at) => episodes[at].tokens).length > 1) wide.push(" · ", h("a", { href: `#siblings-${i}` }, "side by side"));
        return group.episodes.length > 1 && own.length ? [{ wide, kind: "group" }, ...own] : own;
      });
      table.fill(rows);
      shown.textContent = `${count(matching)} of ${count(episodes.length)} shown`;
    };
    const choose = (name) => {
      filter.value = filter.value === name ? "" : name;
      draw();
    };
    this.element = h(
      "section.overview",
      { "aria-label": "Overview" },
      ...index.notes.map((note) => h("p.note", {}, note)),
      index.examined && h("h2", {}, many ? counted(many, "finding") : "No findings"),
      index.examined && (many ? findings : h("p.empty", {}, "The doctor found nothing wrong in these files.")),
      index.steps.length > 0 && steps(index, choose),
      h("div.bar", {}, h("h2", {}, counted(episodes.length, "episode")), episodes.length > 1 && filter, shown),
      table.viewport,
    );
    this.element.classList.toggle("clean", !many);
    findings.style.height = `${many * 58 + 2}px`;
    this.open = () => {
      list.reset(many);
      draw();
    };
  }
}

const MEASURES = {
  reduced: ["what its loss makes of advantage × weight", (abs, weight, reduction) => abs * weight * reduction],
  receives: ["what it receives: |advantage × weight|", (abs, weight) => abs * weight],
  alone: ["what its loss would make of advantages without weights", (abs, weight, reduction) => abs * reduction],
};

const isOff = (value, exact) => Math.abs(value - exact) > 1e-6 * Math.max(exact, 1e-12);

/** What each episode, sequence and turn contributes to the update: exactly, and by the trainer's loss. */
export class Credit {
  constructor({ index }) {
    const audits = index.credit;
    const own = (event) => event.target.value;
    const draw = () => this.draw();
    this.index = index;
    this.group = h("select", { "aria-label": "Batch", onchange: (event) => this.open(Number(own(event))) }, audits.map((audit, i) => h("option", { value: i }, audit.name)));
    this.loss = h("select", { "aria-label": "Your trainer's loss", onchange: draw });
    this.normalizer = h("select", { "aria-label": "Normalizer", onchange: draw });
    this.compares = h("input", { type: "checkbox", onchange: draw });
    this.measure = h("select", { "aria-label": "Show", onchange: draw }, Object.entries(MEASURES).map(([key, [label]]) => h("option", { value: key }, label)));
    this.verdict = h("p.verdict", { role: "status" });
    this.caption = h("p.caption");
    this.table = new Table("Credit audit", 34, (row) => this.cells(row));
    this.audits = audits;
    this.element = h(
      "section.credit",
      { "aria-label": "Credit audit" },
      h("div.bar", {}, audits.length > 1 && this.group, h("label", {}, "your loss ", this.loss), h("label", {}, "normalizer ", this.normalizer), h("label", {}, this.compares, " compare losses"), this.measure),
      this.verdict,
      this.caption,
      h("p.caption", {}, "Σ|A| sums |advantage| over trained tokens; ratio is your loss / exact. Red: not exact. ⚑: a finding."),
      this.table.viewport,
    );
  }

  open(at = this.at ?? 0) {
    this.at = Math.min(at, this.audits.length - 1);
    this.group.value = String(this.at);
    const audit = this.audits[this.at];
    const names = Object.keys(audit.normalizers);
    const options = (values, chosen) => values.map((name) => h("option", { value: name, selected: name === chosen }, name));
    this.normalizer.replaceChildren(...options(names, audit.trainer?.normalizer));
    const { losses } = audit.normalizers[names[0]]; // those of one formula are one choice
    this.loss.replaceChildren(...options(losses.map((loss) => loss.names.join(", ")), audit.trainer?.loss.join(", ")));
    this.caption.textContent = audit.caption;
    this.draw();
  }

  draw() {
    const audit = this.audits[this.at];
    const { losses, exact } = audit.normalizers[this.normalizer.value];
    this.exact = exact;
    this.own = losses.find((loss) => loss.names.join(", ") === this.loss.value);
    this.others = this.compares.checked ? losses : [];
    this.measure.hidden = !this.compares.checked;
    this.judge();
    this.table.head([
      [".name", "Episode, sequence, turn"],
      [".number", "Tokens"],
      [".number", "Σ|A|"],
      [".number", "your loss"],
      [".number", "exact"],
      [".number", "ratio"],
      ...this.others.map((loss) => [".number.trainer", ...loss.names.map((name) => h("span.loss", {}, breakable(name)))]),
    ]);
    const rows = [];
    for (const episode of audit.episodes) {
      const link = `#episode-${episode.episode}`;
      rows.push({ kind: "group", label: episode.name, note: episode.note, found: this.index.episodes[episode.episode].found, link, parts: episode.rows });
      for (const row of episode.rows) {
        if (episode.rows.length > 1) rows.push({ kind: "sequence", label: `sequence ${row.sequence}`, link: `${link}-sequence-${row.sequence}`, parts: [row] });
        for (const turn of row.turns.length > 1 ? row.turns : []) {
          rows.push({ kind: "leaf", label: `turn ${turn.number}`, link: `${link}-sequence-${row.sequence}-turn-${turn.turn}`, parts: [{ ...turn, row: row.row }] });
        }
      }
    }
    this.table.show(rows);
  }

  /** What the trainer's loss makes of parts, by the file's weights if it has any, and what is exact. */
  amounts(parts) {
    const sum = (value) => parts.reduce((total, part) => total + value(part), 0);
    const { weights, reductions } = this.own;
    return [sum((part) => (part.recorded ?? part.abs * weights[part.row]) * reductions[part.row]), sum((part) => part.abs * this.exact[part.row])];
  }

  /** Say in one line whether each episode has the credit that it should. */
  judge() {
    const audit = this.audits[this.at];
    const trained = audit.episodes.filter((episode) => episode.rows.length);
    const off = trained.filter((episode) => isOff(...this.amounts(episode.rows)));
    const found = trained.filter((episode) => this.index.episodes[episode.episode].found);
    const bad = off.length > 0 || found.length > 0;
    const told = [];
    const isFlat = trained.length && trained.every((episode) => episode.rows.every((row) => row.abs === 0));
    if (isFlat) told.push("This group is flat: each advantage is 0, so nothing is learned from it");
    else if (off.length) told.push(`${counted(off.length, "episode")} of ${count(trained.length)} ${off.length === 1 ? "is" : "are"} not exact with your loss`);
    else if (audit.recorded) told.push(`${trained.length === 1 ? "The episode" : `All ${count(trained.length)} episodes`}: exact with your loss`);
    else told.push("The file has no weights: the columns show those that make your loss exact");
    if (off.length && !audit.trainer) told.push("the file's weights are those of none of these losses in one micro-batch: choose yours");
    if (found.length) told.push(`the doctor found something in ${counted(found.length, "episode")} (⚑)`);
    this.verdict.textContent = `${told.join("; ")}.`;
    this.verdict.className = bad ? "verdict bad" : audit.recorded ? "verdict good" : "verdict";
  }

  cells(row) {
    const name = [".name", h("a", { href: row.link }, row.label), row.found ? h("span.alarm", {}, ` ⚑ ${count(row.found)}`) : ""];
    if (row.note) return [name, [".wide", row.note]];
    const sum = (value) => row.parts.reduce((total, part) => total + value(part), 0);
    const [yours, exact] = this.amounts(row.parts);
    const [, measure] = MEASURES[this.measure.value];
    const off = isOff(yours, exact) ? ".off" : "";
    return [
      name,
      [".number", count(sum((part) => part.tokens))],
      [".number", number(sum((part) => part.abs))],
      [`.number${off}`, number(yours)],
      [".number.exact", number(exact)],
      [`.number${off}`, exact ? `${number(yours / exact, 3)}×` : "–"],
      ...this.others.map((loss) => {
        const value = sum((part) => measure(part.abs, loss.weights[part.row], loss.reductions[part.row]));
        const differs = this.measure.value !== "receives" && isOff(value, exact);
        return [`.number.trainer${differs ? ".off" : ""}`, number(value)];
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
    const share = number((100 * drift.tokens) / Math.max(1, drift.all), 2);
    const differ = counted(drift.rows.length, "stretch differs", "stretches differ");
    const summary = `${differ}; ${count(drift.tokens)} of ${counted(drift.all, "token")} (${share}%) in ${counted(drift.sequences, "sequence")}. ${drift.cut ? `The first ${count(drift.rows.length)} are listed.` : ""}`;
    this.element = h(
      "section.drift",
      { "aria-label": "Drift" },
      h("p.caption", {}, summary),
      drift.rows.length ? table.viewport : h("p.empty", {}, "Encoding the text again gives the very same tokens."),
    );
    this.open = () => table.show(drift.rows);
  }
}
