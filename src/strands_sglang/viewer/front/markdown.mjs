// A small Markdown reader for model output. It makes text nodes only, so HTML in the text is shown as text, and links
// and images are named with their address, never followed or loaded.

import { h } from "./dom.mjs";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+ *:?-*:? *$/;

/**
 * Return the elements of a Markdown text.
 *
 * @param {string} text
 * @param {number} most blocks; what follows is one plain text
 */
export function markdown(text, most = 200) {
  const lines = text.replace(/\t/g, "    ").split("\n");
  const made = [];
  let i = 0;
  while (i < lines.length) {
    if (made.length >= most) {
      made.push(h("pre", {}, lines.slice(i).join("\n")));
      break;
    }
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i++;
    } else if ((match = FENCE.exec(line))) {
      const body = [];
      const end = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`);
      for (i++; i < lines.length && !end.test(lines[i]); i++) body.push(lines[i]);
      i++;
      made.push(h("pre", {}, h("code", {}, body.join("\n"))));
    } else if ((match = HEADING.exec(line))) {
      made.push(h("p.heading", {}, inline(match[2])));
      i++;
    } else if (RULE.test(line)) {
      made.push(h("hr"));
      i++;
    } else if (QUOTE.test(line)) {
      const body = [];
      for (; i < lines.length && QUOTE.test(lines[i]); i++) body.push(lines[i].replace(QUOTE, ""));
      made.push(h("blockquote", {}, h("p", {}, inline(body.join("\n")))));
    } else if (ITEM.test(line)) {
      const items = [];
      for (; i < lines.length && lines[i].trim(); i++) {
        match = ITEM.exec(lines[i]);
        if (match) items.push({ depth: Math.min(6, match[1].length >> 1), sign: match[2], text: match[3] });
        else items[items.length - 1].text += "\n" + lines[i].trim();
      }
      made.push(h("ul", {}, items.map((item) => listItem(item))));
    } else if (line.includes("|") && TABLE_RULE.test(lines[i + 1] ?? "")) {
      const rows = [cells(line)];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(cells(lines[i]));
      made.push(table(rows));
    } else {
      const body = [];
      for (; i < lines.length && lines[i].trim() && !startsBlock(lines[i]); i++) body.push(lines[i]);
      if (!body.length) body.push(lines[i++]);
      made.push(h("p", {}, inline(body.join("\n"))));
    }
  }
  return made;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function listItem({ depth, sign, text }) {
  return h(`li.depth${depth}`, {}, h("span.sign", {}, /\d/.test(sign) ? sign : "•"), h("span", {}, inline(text)));
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table([head, ...rows]) {
  return h(
    "div.scroll",
    { tabindex: "0" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, head.map((cell) => h("th", {}, inline(cell))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, inline(cell)))))),
    ),
  );
}

const INLINE =
  /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*(?=\S)([^*\n]{1,500})\*\*|\*(?=\S)([^*\n]{1,500})\*|~~([^~\n]{1,500})~~|!?\[([^\]\n]{0,500})\]\(([^)\s]{1,500})\)|\\([!-/:-@[-`{-~])/g;

/** Return the nodes of a line: code, emphasis, and links with their address in plain sight. */
export function inline(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.slice(0, 20000).matchAll(INLINE)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    const [all, , code, strong, emphasis, struck, label, address, escaped] = match;
    if (code !== undefined) nodes.push(h("code", {}, code));
    else if (strong !== undefined) nodes.push(h("strong", {}, strong));
    else if (emphasis !== undefined) nodes.push(h("em", {}, emphasis));
    else if (struck !== undefined) nodes.push(h("s", {}, struck));
    else if (address !== undefined) nodes.push(h("span.link", {}, label || address), h("span.address", {}, ` (${address})`));
    else nodes.push(escaped);
    from = match.index + all.length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}
