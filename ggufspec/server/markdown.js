"use strict";
/* Shows Markdown as elements, from the tokens of marked. A model's text only ever becomes text nodes, never HTML, and
   nothing is loaded: HTML is shown as it is written, an image as a link. */
const markdown = (() => {
  const options = {gfm: true, breaks: true};
  const entities = {amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0"};
  const loosest = 2;  // blocks at the end that more text may change; with 1, some random texts differed

  // Inline tokens of marked have entities, its own and the text's.
  function decoded(text) {
    return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/gi, (whole, decimal, hex, name) => {
      if (name) return entities[name.toLowerCase()];
      const code = decimal ? parseInt(decimal, 10) : parseInt(hex, 16);
      return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
    });
  }

  function element(tag, tokens) {
    const made = document.createElement(tag);
    if (tokens) made.append(...tokens.map(inline));
    return made;
  }

  function link(token, content) {
    const address = decoded(token.href);
    if (!/^(https?:\/\/|mailto:)/i.test(address)) return element("span", content);
    const made = element("a", content);
    Object.assign(made, {href: address, title: address, target: "_blank", rel: "noopener noreferrer"});
    return made;
  }

  function inline(token) {
    switch (token.type) {
      case "strong": case "em": case "del": return element(token.type, token.tokens);
      case "br": return element("br");
      case "codespan": { const made = element("code"); made.textContent = decoded(token.text); return made; }
      case "link": return link(token, token.tokens);
      case "image": return link(token, [{type: "text", text: token.text || token.href}]);
      case "html": return /^<br *\/?>$/i.test(token.text) ? element("br") : new Text(token.text);
      default: return token.tokens ? element("span", token.tokens) : new Text(decoded(token.text ?? token.raw));
    }
  }

  function code(token) {
    const made = element("div"), bar = element("div"), button = element("button"), body = element("pre");
    made.className = "code";
    bar.append((token.lang || "").trim().split(/\s/)[0], button);
    button.type = "button";
    button.textContent = "Copy";
    button.className = "copy";
    button.setAttribute("aria-label", "Copy code");
    body.tabIndex = 0;  // it scrolls, so the keyboard must reach it
    body.append(element("code"));
    body.firstChild.textContent = token.text;
    made.append(bar, body);
    return made;
  }

  function table(token) {
    const made = element("table");
    const row = (cells, tag) => {
      const line = element("tr");
      for (const cell of cells) {
        const box = element(tag, cell.tokens);
        if (cell.align) box.className = cell.align;
        line.append(box);
      }
      return line;
    };
    const [head, body, frame] = [element("thead"), element("tbody"), element("div")];
    head.append(row(token.header, "th"));
    body.append(...token.rows.map((cells) => row(cells, "td")));
    made.append(head, body);
    frame.className = "wide";
    frame.tabIndex = 0;
    frame.append(made);
    return frame;
  }

  function list(token) {
    const made = element(token.ordered ? "ol" : "ul");
    if (token.ordered && token.start !== 1) made.start = token.start;
    for (const item of token.items) {
      const line = element("li");
      if (item.task) line.append(item.checked ? "☑ " : "☐ ");
      line.append(...blocks(item.tokens, item.loose));
      made.append(line);
    }
    return made;
  }

  function block(token, loose) {
    switch (token.type) {
      case "heading": return element("h" + Math.min(6, token.depth + 1), token.tokens);
      case "code": return code(token);
      case "table": return table(token);
      case "list": return list(token);
      case "hr": return element("hr");
      case "blockquote": { const made = element("blockquote"); made.append(...blocks(token.tokens, true)); return made; }
      case "paragraph": return element("p", token.tokens);
      case "html": { const made = element("p"); made.textContent = token.text.trimEnd(); return made; }
      default: return element(loose ? "p" : "span", token.tokens || [{type: "text", text: token.text ?? token.raw}]);
    }
  }

  const isShown = (token) => token.type !== "space" && token.type !== "def";
  const blocks = (tokens, loose) => tokens.filter(isShown).map((token) => block(token, loose));

  /* Brings `container` up to date with a text that has grown since the last call. Only its last blocks are parsed and
     built again: beside a model on the same processor, each repetition would slow the model down. */
  function show(container, text) {
    const known = container.known ||= {n_characters: 0, n_blocks: 0};
    const rest = text.slice(known.n_characters);
    const tokens = marked.lexer(rest, options), shown = tokens.filter(isShown);
    shown.forEach((token, i) => {
      const old = container.children[known.n_blocks + i];
      if (old && old.source === token.raw) return;
      const made = block(token, true);
      made.source = token.raw;
      if (old) old.replaceWith(made); else container.append(made);
    });
    while (container.children.length > known.n_blocks + shown.length) container.lastChild.remove();
    let n = 0;
    for (const token of tokens.slice(0, Math.max(0, tokens.indexOf(shown.at(-loosest))))) {
      if (!rest.startsWith(token.raw, n)) return;  // the parser has changed it
      n += token.raw.length;
      known.n_characters += token.raw.length;
      if (isShown(token)) known.n_blocks += 1;
    }
  }

  return {show};
})();
