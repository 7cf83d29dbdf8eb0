// Files that go with a message: images and sounds as addresses of their data, and texts.

import { element } from "./dom.js";

const MOST_SIDE = 2048, MOST_PNG = 2 ** 20;  // pixels, bytes: larger images are scaled down, or JPEG
const MOST_TEXT = 2 ** 20;  // bytes of a text file
const MEDIA = /\.(png|jpe?g|gif|webp|avif|bmp|wav|mp3|flac|ogg|opus|m4a)$/i;
const RATE = 16000;  // samples a second of sounds, as projectors hear them

export const isSound = (url) => url.startsWith("data:audio/");

export function preview(url, number) {
  const made = element(isSound(url) ? "audio" : "img");
  made.src = url;
  made.alt = `Image ${number + 1}`;
  return made;
}

/** What a file is for a model: `{ image }` or `{ file }`. Throws Error with what is wrong with it. */
export async function taken(file, { sees, hears }) {
  if (!/^(image|audio)\//.test(file.type) && !MEDIA.test(file.name)) {
    const text = await textOf(file);
    if (text !== null) return { file: { name: file.name.slice(0, 200), text } };
  }
  if (!sees && !hears) {
    throw new Error("This model reads text alone. Start the server with --mmproj FILE for images.");
  }
  const isHeard = file.type.startsWith("audio/") || !sees, what = isHeard ? "sound" : "image";
  if (isHeard ? !hears : !sees) throw new Error(`This model takes no ${what}s, as ${file.name}.`);
  try { return { image: await (isHeard ? soundOf(file) : imageOf(file)) }; } catch {
    throw new Error(`${file.name} is no ${what} that this browser can read.`);
  }
}

/** A file's text; null where it is none. */
async function textOf(file) {
  if (file.size > MOST_TEXT) throw new Error(`${file.name} is larger than 1 MiB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch { return null; }
}

// A WAV file of one channel, whatever the browser can decode.
async function soundOf(file) {
  const decoder = new OfflineAudioContext(1, 1, RATE);  // takes samples to its own rate
  const sound = await decoder.decodeAudioData(await file.arrayBuffer());
  const channels = Array.from({ length: sound.numberOfChannels }, (_, one) => sound.getChannelData(one));
  const data = new DataView(new ArrayBuffer(44 + 2 * sound.length));
  const words = (place, text) => [...text].forEach((one, n) => data.setUint8(place + n, one.charCodeAt(0)));
  words(0, "RIFF");
  data.setUint32(4, 36 + 2 * sound.length, true);
  words(8, "WAVEfmt ");
  [16, 1 | 1 << 16, RATE, 2 * RATE, 2 | 16 << 16].forEach((one, n) => data.setUint32(16 + 4 * n, one, true));
  words(36, "data");
  data.setUint32(40, 2 * sound.length, true);
  for (let n = 0; n < sound.length; n++) {
    const value = channels.reduce((sum, one) => sum + one[n], 0) / channels.length;
    data.setInt16(44 + 2 * n, 32767 * Math.max(-1, Math.min(1, value)), true);
  }
  const reader = new FileReader();
  return new Promise((done) => {
    reader.onload = () => done(reader.result);
    reader.readAsDataURL(new Blob([data], { type: "audio/wav" }));
  });
}
// Scaled and turned upright.
async function imageOf(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas"), isSmall = file.type === "image/png" && file.size <= MOST_PNG;
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff";  // behind what is transparent
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return isSmall ? canvas.toDataURL("image/png") : canvas.toDataURL("image/jpeg", 0.9);
}
