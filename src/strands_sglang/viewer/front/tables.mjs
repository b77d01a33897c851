// The overview, the credit audit and the drift: long tables of which only the rows in view are in the document.

import { count, counted, filterField, h, number, options, pane } from "./dom.mjs";
import { outcomeChip, rewardChip } from "./score.mjs";
import { visible } from "./text.mjs";
import { VirtualList } from "./virtual.mjs";

/** Whether there is anything to show. */
export function isKnown(value) {
  return value !== null && value !== undefined && value !== "";
}

/** Sort values; unknown ones come last in either direction, and equal ones keep their order. */
export function sorted(rows, valueOf, descending) {
  return rows
    .map((row) => ({ row, value: valueOf(row) }))
    .sort((a, b) => {
      if (!isKnown(a.value) || !isKnown(b.value)) return isKnown(b.value) - isKnown(a.value);
      const order = typeof a.value === "string" ? a.value.localeCompare(b.value, "en", { numeric: true }) : a.value - b.value;
      return descending ? -order : order;
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
 * A table whose heads sort it.
 *
 * Columns are `{name, kind, width: [px, share], value(row), cell(row)}`; those without `value` sort nothing. A row with
 * `wide` is a line of its own, which a sorted table does not have.
 */
export class Table {
  constructor(label, columns, height = 34) {
    this.viewport = pane("viewport.rows", label, "table");
    this.list = new VirtualList(this.viewport, height, (at) => this.line(this.shown[at]));
    this.list.spacer.setAttribute("role", "rowgroup");
    this.header = h("div.line.head", { role: "row" });
    this.viewport.prepend(this.header);
    this.sort = { column: null, descending: false };
    this.columns = columns;
  }

  line(row) {
    const cells = row.wide ? [[".wide", row.wide]] : this.columns.map(({ kind = "", cell }) => [kind, cell(row)]);
    const line = h(`div.line${row.kind ? `.${row.kind}` : ""}`, { role: "row" });
    line.append(...cells.map(([kind, content]) => h(`div.cell${kind}`, { role: "cell" }, ...[content].flat())));
    return line;
  }

  /** Show rows in the order that was chosen, else as they come. */
  fill(rows) {
    const { column, descending } = this.sort;
    this.given = rows;
    this.shown = column === null ? rows : sorted(rows.filter(({ wide }) => !wide), this.columns[column].value, descending);
    const tracks = this.columns.map(({ width: [least, share] }) => (share ? `minmax(${least}px, ${share}fr)` : `${least}px`));
    const { style } = this.viewport;
    style.setProperty("--columns", tracks.join(" "));
    style.setProperty("--least", `${this.columns.reduce((sum, { width }) => sum + width[0] + 12, 10)}px`);
    this.header.replaceChildren(
      ...this.columns.map(({ name, kind = "", value }, i) => {
        const sign = column === i ? (descending ? " ▼" : " ▲") : "";
        const order = sign && (descending ? "descending" : "ascending");
        const head = value ? h("button", { onclick: () => this.sortBy(i) }, name + sign) : name;
        return h(`div.cell${kind}`, { role: "columnheader", "aria-sort": order || null }, head);
      }),
    );
    this.viewport.scrollTop = 0;
    this.list.reset(this.shown.length);
  }

  sortBy(column) {
    this.sort = { column, descending: this.sort.column === column && !this.sort.descending };
    this.fill(this.given);
    this.header.children[column].firstChild.focus();
  }
}

/** A column of numbers. */
export function figures(name, value, width = 84, digits = 4) {
  return { name, kind: ".number", width: [width, 0], value, cell: (row) => number(value(row), digits) };
}

/** A column of texts, each whole in its title. */
export function texts(name, value, width, share) {
  return { name, width: [width, share], value, cell: (row) => h("span", { title: value(row) }, value(row)) };
}

/** How many findings there are, if any. */
function alarm(found) {
  return found > 0 && h("span.alarm", {}, ` ⚑ ${count(found)} `);
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
    const { episodes, groups } = index;
    const many = index.findings.length;
    const findings = pane("viewport.findings", "Findings");
    const list = new VirtualList(findings, 58, (i) => {
      const { title, where, why } = index.findings[i];
      return h("a.finding", { href: `#finding-${i + 1}`, title: why }, h("span.line1", {}, h("b", {}, title), " ", h("span.where", {}, where)), h("span.line2", {}, why));
    });
    const of = (name) => (at) => episodes[at][name];
    const total = (name, value) => ({ ...figures(name, value, 60), cell: (at) => (value(at) === null ? "–" : count(value(at))) });
    const columns = [
      { ...texts("Episode", of("id"), index.steps.length ? 184 : 110, 1), kind: ".name", cell: (at) => h("a", { href: `#episode-${at}`, title: episodes[at].key ?? episodes[at].id }, episodes[at].id) },
      texts("Question", of("question"), 170, 2),
      texts("Answer", of("answer"), 150, 2),
      texts("Target", of("target"), 100, 1),
      { ...figures("Reward", of("reward"), 64), cell: (at) => rewardChip(episodes[at].reward, index.report?.success_threshold) },
      { ...texts("Outcome", of("outcome"), 160, 0), cell: (at) => outcomeChip(episodes[at].outcome) },
      figures("Advantage", of("advantage"), 76, 3),
      total("Turns", of("turns")),
      total("Tokens", of("tokens")),
      total("Trained", of("trained")),
      figures("Max gap", of("gap"), 76, 3),
      figures("Seconds", of("seconds"), 64, 3),
      { name: "Notes", width: [140, 1], value: (at) => -episodes[at].found || episodes[at].note || null, cell: (at) => [alarm(episodes[at].found), h("span", { title: episodes[at].note }, episodes[at].note)] },
    ];
    const table = new Table("Episodes", columns.filter(({ value }) => episodes.some((_, at) => isKnown(value(at)))));
    const filter = filterField("Filter the episodes", "Filter the episodes", () => draw());
    const shown = h("span.caption", { role: "status" });
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
    findings.style.height = `${many * 58 + 2}px`;
    this.open = () => {
      list.reset(many);
      draw();
    };
  }
}

const isOff = ({ yours, exact }) => Math.abs(yours - exact) > 1e-6 * Math.max(exact, 1e-12);

/** What each episode, sequence and turn contributes to the update: exactly, and by the trainer's loss. */
export class Credit {
  constructor({ index }) {
    const draw = () => this.draw();
    this.episodes = index.episodes;
    this.audits = index.credit;
    this.batch = h("select", { "aria-label": "Batch", onchange: () => this.open() }, options(this.audits.map(({ name }, i) => [i, name])));
    this.loss = h("select", { "aria-label": "Your trainer's loss", onchange: draw });
    this.normalizer = h("select", { "aria-label": "Normalizer", onchange: draw });
    this.compares = h("input", { type: "checkbox", onchange: draw });
    this.verdict = h("p.verdict", { role: "status" });
    this.caption = h("p.caption");
    this.table = new Table("Credit audit", []);
    this.element = h(
      "section.credit",
      { "aria-label": "Credit audit" },
      h("div.bar", {}, this.audits.length > 1 && this.batch, h("label", {}, "your loss ", this.loss), h("label", {}, "normalizer ", this.normalizer), h("label", {}, this.compares, " compare losses")),
      this.verdict,
      this.caption,
      h("p.caption", {}, "Σ|A| sums |advantage| over trained tokens; ratio is your loss / exact. Red: not exact. ⚑: a finding."),
      this.table.viewport,
    );
  }

  open(at = this.batch.value) {
    this.audit = this.audits[at] ?? this.audits[0];
    this.batch.value = this.audits.indexOf(this.audit);
    const { normalizers, trainer, caption } = this.audit;
    const [{ losses }] = Object.values(normalizers); // those of one formula are one choice
    const fitting = losses.findIndex(({ names }) => String(names) === String(trainer?.loss));
    this.normalizer.replaceChildren(...options(Object.keys(normalizers).map((name) => [name, name]), trainer?.normalizer));
    this.loss.replaceChildren(...options(losses.map(({ names }, i) => [i, names.join(", ")]), fitting));
    this.caption.textContent = caption;
    this.draw();
  }

  draw() {
    const { losses, exact } = this.audit.normalizers[this.normalizer.value];
    const own = losses[this.loss.value];
    const sum = (parts, value) => parts.reduce((total, part) => total + value(part), 0);
    const row = (kind, label, address, parts, found) => ({
      ...{ kind, parts, found, link: h("a", { href: `#episode-${address}` }, label) },
      tokens: sum(parts, (part) => part.tokens),
      abs: sum(parts, (part) => part.abs),
      yours: sum(parts, (part) => (part.recorded ?? part.abs * own.weights[part.row]) * own.reductions[part.row]),
      exact: sum(parts, (part) => part.abs * exact[part.row]),
    });
    const rows = this.audit.episodes.flatMap(({ name, note, episode, rows }) => {
      const whole = row("group", name, episode, rows, this.episodes[episode].found);
      if (note) return [{ ...whole, wide: [whole.link, alarm(whole.found), ` · ${note}`] }];
      const parts = rows.flatMap((one) => {
        const address = `${episode}-sequence-${one.sequence}`;
        const turns = one.turns.map((turn) => row("leaf", `turn ${turn.number}`, `${address}-turn-${turn.turn}`, [{ ...turn, row: one.row }]));
        return [...(rows.length > 1 ? [row("sequence", `sequence ${one.sequence}`, address, [one])] : []), ...(turns.length > 1 ? turns : [])];
      });
      return [whole, ...parts];
    });
    const column = (name, cell, kind = "", width = 92) => ({ name, kind: `.number${kind}`, width: [width, 0], cell });
    const judged = (told, row) => h(`span${isOff(row) ? ".off" : ""}`, {}, told);
    this.table.columns = [
      { name: "Episode, sequence, turn", kind: ".name", width: [170, 1], cell: ({ link, found }) => [link, alarm(found)] },
      column("Tokens", ({ tokens }) => count(tokens)),
      column("Σ|A|", ({ abs }) => number(abs)),
      column("your loss", (row) => judged(number(row.yours), row)),
      column("exact", ({ exact }) => number(exact), ".exact"),
      column("ratio", (row) => judged(row.exact ? `${number(row.yours / row.exact, 3)}×` : "–", row)),
      ...(this.compares.checked ? losses : []).map(({ names, weights, reductions }) =>
        column(names.map((name) => h("span.loss", {}, name)), ({ parts, exact }) => {
          const yours = sum(parts, (part) => part.abs * weights[part.row] * reductions[part.row]);
          return judged(number(yours), { yours, exact });
        }, ".trainer", 140),
      ),
    ];
    this.judge(rows.filter(({ kind, wide }) => kind === "group" && !wide));
    this.table.fill(rows);
  }

  /** Say in one line whether each of the trained episodes has the credit that it should. */
  judge(trained) {
    const { recorded, trainer } = this.audit;
    const off = trained.filter(isOff);
    const found = trained.filter(({ found }) => found);
    const told = [];
    if (trained.length && trained.every(({ abs }) => abs === 0)) told.push("This group is flat: each advantage is 0, so nothing is learned from it");
    else if (off.length) told.push(`${counted(off.length, "episode")} of ${count(trained.length)} ${off.length === 1 ? "is" : "are"} not exact with your loss`);
    else if (recorded) told.push(`${trained.length === 1 ? "The episode" : `All ${count(trained.length)} episodes`}: exact with your loss`);
    else told.push("The file has no weights: the columns show those that make your loss exact");
    if (off.length && !trainer) told.push("the file's weights are those of none of these losses in one micro-batch: choose yours");
    if (found.length) told.push(`the doctor found something in ${counted(found.length, "episode")} (⚑)`);
    this.verdict.textContent = `${told.join("; ")}.`;
    this.verdict.className = `verdict ${off.length || found.length ? "bad" : recorded ? "good" : ""}`;
  }
}

/** Where encoding the text again gives other tokens. */
export class Drift {
  constructor({ index }) {
    const { drift } = index;
    const side = (tokens) => tokens.map(([id, text]) => h("span.token", {}, h("span.t", {}, visible(text)), h("span.id", {}, String(id))));
    const where = ({ episode, sequence, position }) =>
      h("a", { href: `#episode-${episode}-sequence-${sequence}-token-${position}` }, `${index.episodes[episode].id}, token ${count(position)}`);
    const columns = [
      { name: "Where", kind: ".name", width: [170, 1], cell: where },
      { name: "Cause", width: [90, 0], cell: ({ cause }) => cause },
      { name: "Sampled or sent", kind: ".side", width: [200, 2], cell: ({ recorded }) => side(recorded) },
      { name: "Encoded again", kind: ".side", width: [200, 2], cell: ({ again }) => side(again) },
    ];
    const table = new Table("Drift", columns, 62);
    const share = number((100 * drift.tokens) / Math.max(1, drift.all), 2);
    const differ = counted(drift.rows.length, "stretch differs", "stretches differ");
    const summary = `${differ}; ${count(drift.tokens)} of ${counted(drift.all, "token")} (${share}%) in ${counted(drift.sequences, "sequence")}. ${drift.cut ? `The first ${count(drift.rows.length)} are listed.` : ""}`;
    this.element = h(
      "section.drift",
      { "aria-label": "Drift" },
      h("p.caption", {}, summary),
      drift.rows.length ? table.viewport : h("p.empty", {}, "Encoding the text again gives the very same tokens."),
    );
    this.open = () => table.fill(drift.rows);
  }
}
