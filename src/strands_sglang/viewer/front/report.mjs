// An evaluation, or two compared: tables, plots, and the tasks, whose samples open in the view of an episode.

import { count, h, number } from "./dom.mjs";
import { Table } from "./tables.mjs";

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

/** The tasks that have all words of a text in their id or question, and a state. */
export function filtered(tasks, text, state) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return tasks.filter((task) => {
    const own = `${task.name} ${task.question}`.toLowerCase();
    return (!state || task.state === state) && words.every((word) => own.includes(word));
  });
}

/** A picture, parsed as a document of its own: markup in it is not part of the page's scripts or styles. */
function picture({ title, says, svg }) {
  const root = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
  root.setAttribute("role", "img");
  root.setAttribute("aria-label", `${title}. ${says}`);
  root.removeAttribute("width");
  root.removeAttribute("height");
  return h("figure.plot", {}, h("figcaption", {}, title), root);
}

function plain({ title, head, rows }) {
  const cell = (kind, text, i) => h(i ? `${kind}.number` : kind, kind === "th" ? { scope: "col" } : {}, text);
  return h(
    "div.plain",
    {},
    h("h2", {}, title),
    h(
      "div.scroll",
      { tabindex: "0", role: "group", "aria-label": title },
      h("table", {}, h("thead", {}, h("tr", {}, head.map((text, i) => cell(text ? "th" : "td", text, i)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text, i) => cell("td", text, i)))))),
    ),
  );
}

export class ReportView {
  constructor({ index }) {
    const { report } = index;
    this.report = report;
    const names = Object.keys(report.metrics);
    const draw = () => this.draw();
    this.metric = h("select", { "aria-label": "Metric", onchange: () => this.choose() }, names.map((name) => h("option", { value: name }, name)));
    this.filter = h("input", { type: "search", placeholder: "Filter by id or question", "aria-label": "Filter the tasks", oninput: draw, spellcheck: "false" });
    this.state = h("select", { "aria-label": "State", onchange: draw }, h("option", { value: "" }, "all states"), report.states.map((state) => h("option", { value: state }, state)));
    this.shown = h("span.caption", { role: "status" });
    this.plot = h("div.chosen");
    this.sort = { column: null, descending: false };
    this.columns = [
      { name: "Task", kind: ".name", value: (task) => task.name, cell: (task) => [this.link(task)] },
      { name: "State", kind: "", value: (task) => report.states.indexOf(task.state), cell: (task) => [task.state] },
      ...report.columns.map((name, i) => this.numeric(name, (task) => task.values[this.metric.value]?.[i])),
      ...report.facts.map((name, i) => this.numeric(name, (task) => task.facts[i])),
      ...report.evaluations.map((name, which) => ({
        name,
        kind: ".samples",
        value: (task) => task.samples[which].length,
        cell: (task) => task.samples[which].map(([reward, episode], i) => h("a", { href: `#episode-${episode}`, title: `reward ${reward}, sample ${i}: ${index.episodes[episode].outcome}` }, reward)),
      })),
      { name: "Question", kind: ".question", value: (task) => task.question, cell: (task) => [task.question] },
    ];
    this.table = new Table("Tasks", 34, (task) => this.columns.map(({ kind, cell }) => [kind, ...cell(task)]));
    this.table.viewport.classList.add(`columns${report.columns.length}`);
    this.episodes = index.episodes;
    this.element = h(
      "section.report",
      { "aria-label": report.name, tabindex: "0" },
      ...report.notes.map((note) => h("p.caption", {}, note)),
      h("div.tables", {}, report.tables.map(plain)),
      names.length > 0 && h("div.bar", {}, h("label", {}, "metric ", this.metric)),
      h("div.plots", {}, this.plot, ...report.plots.map(picture)),
      h("h2", {}, `${count(report.tasks.length)} ${report.tasks.length === 1 ? "task" : "tasks"}`),
      h("div.bar", {}, this.filter, this.state, this.shown),
      this.table.viewport,
    );
  }

  numeric(name, value) {
    return { name, kind: ".number", value, cell: (task) => [number(value(task), 4)] };
  }

  /** The name of a task: it leads to its samples side by side if their tokens are known, else to the first. */
  link(task) {
    const own = task.samples[0].map(([, at]) => at);
    if (!own.length) return task.name;
    const many = own.filter((at) => this.episodes[at].tokens).length > 1;
    return h("a", { href: many ? `#siblings-${this.episodes[own[0]].group}` : `#episode-${own[0]}` }, task.name);
  }

  open() {
    if (!this.opened) this.choose();
    this.opened = true;
  }

  choose() {
    const plot = this.report.metrics[this.metric.value];
    this.plot.replaceChildren(...(plot ? [picture(plot)] : []));
    this.plot.hidden = !plot;
    this.draw();
  }

  draw() {
    const { column, descending } = this.sort;
    this.table.head(
      this.columns.map((one, i) => {
        const sign = column === i ? (descending ? " ▼" : " ▲") : "";
        const metric = one.name === "Value" ? this.metric.value || "Value" : one.name;
        return [one.kind, h("button", { onclick: () => this.sortBy(i) }, metric + sign)];
      }),
    );
    if (column !== null) this.table.header.children[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    const tasks = filtered(this.report.tasks, this.filter.value, this.state.value);
    this.table.show(column === null ? tasks : sorted(tasks, this.columns[column].value, descending));
    this.shown.textContent = `${count(tasks.length)} of ${count(this.report.tasks.length)} shown`;
  }

  sortBy(column) {
    this.sort = { column, descending: this.sort.column === column && !this.sort.descending };
    this.draw();
    this.table.header.children[column].firstChild.focus();
  }
}
