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

// Marks that turn the direction of text, or that nobody sees, as their codes: they would make a name look like another.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const visible = (text) => String(text).replace(HIDDEN, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? stood(child) : document.createTextNode(visible(child)));
  }
}

// A kept element that is on the page stays where it is: taken out, it would lose focus and scrolling. Something stands
// for it until `morph` comes to its place.
function stood(child) {
  if (!child.kept || !child.isConnected) return child;
  const stand = document.createComment("");
  stand.standsFor = child;
  return stand;
}

function putStanding(tree) {
  const walker = document.createTreeWalker(tree, NodeFilter.SHOW_COMMENT);
  const stands = [];
  while (walker.nextNode()) if (walker.currentNode.standsFor) stands.push(walker.currentNode);
  for (const stand of stands) stand.replaceWith(stand.standsFor);
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
    const real = child.standsFor ?? child;
    if (place && alike(place, real)) {
      if (place !== real) renew(place, real);
      place = place.nextSibling;
    } else if (place && real.kept && real.parentNode === old) {
      // What is before it goes, so that it need not move.
      while (place !== real) {
        const gone = place;
        place = place.nextSibling;
        gone.remove();
      }
      place = real.nextSibling;
    } else {
      const later = real.key === undefined ? null : laterAlike(place, real);
      if (later) {
        old.insertBefore(later, place);
        renew(later, real);
      } else {
        old.insertBefore(real, place);
        if (!real.kept) putStanding(real);
      }
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

const alike = (one, other) => one === other || (!one.kept && !other.kept && one.nodeName === other.nodeName && one.key === other.key);

function renew(old, wanted) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
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
