// Elements without a framework: `h` makes them, `show` brings what is there up to date and keeps focus and scrolling.

const SVG = "http://www.w3.org/2000/svg";

function make(space, tag, attributes, children) {
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) listen(element, name.slice(2), value);
    else if (name === "key") element.key = value;
    else if (name === "style") Object.entries(value).forEach(([key, text]) => element.style.setProperty(key, text));
    else if (name === "value" || name === "checked" || name === "indeterminate") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function listen(element, event, handler) {
  element.handlers ??= {};
  if (!(event in element.handlers)) element.addEventListener(event, (found) => element.handlers[event]?.(found));
  element.handlers[event] = handler;
}

export const h = (tag, attributes, ...children) => make(null, tag, attributes, children);
export const s = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

// Makes `parent` hold what `children` are. Elements of the same tag and key stay and change; those marked `kept` have
// contents of their own (charts, dialogs) and are left alone.
export function show(parent, ...children) {
  const wanted = document.createDocumentFragment();
  add(wanted, children);
  morph(parent, wanted);
}

function morph(old, wanted) {
  const next = [...wanted.childNodes];
  let place = old.firstChild;
  for (const child of next) {
    if (place && alike(place, child)) {
      renew(place, child);
      place = place.nextSibling;
    } else {
      const later = child.key === undefined ? null : laterAlike(place, child);
      if (later) {
        old.insertBefore(later, place);
        renew(later, child);
      } else old.insertBefore(child, place);
    }
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

function laterAlike(place, child) {
  for (let at = place?.nextSibling; at; at = at.nextSibling) if (alike(at, child)) return at;
  return null;
}

const alike = (one, other) => one.nodeName === other.nodeName && one.key === other.key;

function renew(old, wanted) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  if (old.kept) return;
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name) && name !== "style") old.removeAttribute(name);
  for (const { name, value } of [...wanted.attributes]) if (old.getAttribute(name) !== value && name !== "style") old.setAttribute(name, value);
  if (wanted.style?.cssText !== old.style?.cssText) old.style.cssText = wanted.style.cssText;
  for (const event of Object.keys(old.handlers ?? {})) old.handlers[event] = null;
  for (const [event, handler] of Object.entries(wanted.handlers ?? {})) listen(old, event, handler);
  if (old instanceof HTMLInputElement) {
    if (old.type === "checkbox") { old.checked = wanted.checked; old.indeterminate = wanted.indeterminate; }
    return;  // what somebody types stays
  }
  if (old instanceof HTMLSelectElement && document.activeElement === old) return;
  morph(old, wanted);
}

export function kept(element) {
  element.kept = true;
  return element;
}
