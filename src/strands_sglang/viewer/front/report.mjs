// An evaluation, or two compared: tables, plots, and the tasks, whose samples open in the view of an episode.

import { count, counted, h, number } from "./dom.mjs";
import { rewardChip } from "./score.mjs";
import { SortedTable, filtered } from "./tables.mjs";

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
    const words = (name, width, share, value) => ({ name, width: [width, share], value, cell: (task) => h("span", { title: value(task) }, value(task)) });
    const metrics = report.columns.map((name, i) => this.numeric(name, (task) => task.values[this.metric.value]?.[i]));
    this.value = report.columns.length === 1 ? metrics[0] : null;
    const columns = [
      { name: "Task", kind: ".name", width: [130, 1], value: (task) => task.name, cell: (task) => this.link(task) },
      { name: "State", width: [130, 0], value: (task) => report.states.indexOf(task.state), cell: (task) => task.state },
      ...metrics,
      ...report.facts.map((name, i) => this.numeric(name, (task) => task.facts[i])),
      ...report.evaluations.map((name, which) => ({
        name,
        kind: ".samples",
        width: [270, 1],
        value: (task) => task.samples[which].length,
        cell: (task) => task.samples[which].map(([reward, episode], i) => h("a", { href: `#episode-${episode}`, title: `reward ${reward}, sample ${i}: ${index.episodes[episode].outcome}` }, rewardChip(index.episodes[episode].reward, report.success_threshold))),
      })),
      words("Question", 190, 2, (task) => task.question),
      words("Target", 100, 1, (task) => task.target),
    ].filter(({ name }) => name !== "Target" || report.tasks.some((task) => task.target));
    this.table = new SortedTable("Tasks", columns);
    this.episodes = index.episodes;
    this.element = h(
      "section.report",
      { "aria-label": report.name, tabindex: "0" },
      h("div.about", {}, h("h2", {}, report.headline), h("dl", {}, report.about.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))))),
      ...report.notes.map((note) => h("p.caption", {}, note)),
      h("div.blocks", {}, report.tables.map(plain), this.plot, ...report.plots.map(picture)),
      h("h2", {}, counted(report.tasks.length, "task")),
      h("div.bar", {}, this.filter, this.state, names.length > 0 && h("label", {}, "metric of the table and its plot ", this.metric), this.shown),
      this.table.viewport,
    );
  }

  numeric(name, value) {
    return { name, kind: ".number", width: [84, 0], value, cell: (task) => number(value(task), 4) };
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
    if (this.value) this.value.name = this.metric.value || "Value";
    const { tasks } = this.report;
    const inState = tasks.filter((task) => !this.state.value || task.state === this.state.value);
    const shown = filtered(inState, this.filter.value, (task) => `${task.name} ${task.question}`);
    this.table.fill(shown);
    this.shown.textContent = `${count(shown.length)} of ${count(tasks.length)} shown`;
  }
}
