// The colours of maps, for light and dark. Knows no data.

const RAMPS = {
  light: ["#f4f6f2", "#cfe5dc", "#8cc5c2", "#4a97ae", "#2f6795", "#2d3a72", "#231b46"],
  dark: ["#1a2231", "#1f3f5d", "#226884", "#3a9494", "#7cbd92", "#c9dd9a", "#fbf7cf"],
};
const DIVERGING = {
  light: ["#274b8f", "#5b8bc4", "#b3cde6", "#f5f4ef", "#f2cda4", "#d98a4a", "#96490f"],
  dark: ["#8db8f0", "#4f7fbd", "#2b4568", "#1d232e", "#5d4128", "#b0733b", "#f3b778"],
};
const SPECIAL = {
  light: { bad: "#e0115f", zero: "#e6e3da", missing: "#ffffff" },
  dark: { bad: "#ff4d8d", zero: "#2a2d35", missing: "#14171c" },
};
const SHADES = 256;

export function parseColour(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function makeRamp(stops) {
  const colours = stops.map(parseColour);
  const shades = new Uint32Array(SHADES);
  for (let shade = 0; shade < SHADES; shade += 1) {
    const place = (shade / (SHADES - 1)) * (colours.length - 1);
    const at = Math.min(colours.length - 2, Math.floor(place));
    const [red, green, blue] = [0, 1, 2].map((i) =>
      Math.round(colours[at][i] + (colours[at + 1][i] - colours[at][i]) * (place - at)),
    );
    shades[shade] = toPixel(red, green, blue);
  }
  return shades;
}

// As the bytes of an image lie in memory on every machine that browsers run on.
function toPixel(red, green, blue) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export function makePalette(theme, isDiverging) {
  const special = SPECIAL[theme];
  const pixel = (name) => toPixel(...parseColour(special[name]));
  return {
    shades: makeRamp((isDiverging ? DIVERGING : RAMPS)[theme]),
    bad: pixel("bad"),
    zero: pixel("zero"),
    missing: pixel("missing"),
    names: special,
  };
}

export function shadeOf(palette, share) {
  const clamped = Math.max(0, Math.min(SHADES - 1, Math.round(share * (SHADES - 1))));
  return palette.shades[clamped];
}

export function pixelToText(pixel) {
  const parts = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  return `rgb(${parts.join(" ")})`;
}
